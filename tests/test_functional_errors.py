"""Every wrong argument of attention() and merge_attention() meets an error that says what is allowed."""

import math
import re

import pytest
import torch
from torch.nn.attention.bias import causal_upper_left

from attn_ext import attention, merge_attention, ops, scaled_dot_product_attention

B, H, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 3, 6
Q, K, V = torch.randn(B, H, NQ, D), torch.randn(B, HKV, NK, D), torch.randn(B, HKV, NK, DV)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# What is wrong: (arguments that replace the good ones, exception, words that the message must have).
WRONG = {
    # types, dtypes, layouts, devices
    "q is a list": ({"q": [[1.0]]}, TypeError, ["q must be a torch.Tensor", "list"]),
    "v is None": ({"v": None}, TypeError, ["v must be a torch.Tensor", "NoneType"]),
    "k of another dtype": ({"k": K.half()}, TypeError, ["same dtype", "q torch.float32", "k torch.float16"]),
    "v of float64": ({"v": V.double()}, TypeError, ["same dtype", "v torch.float64"]),
    "complex": ({"q": Q + 0j, "k": K + 0j, "v": V + 0j}, TypeError, ["complex64", "bfloat16"]),
    "integer": ({"q": Q.int(), "k": K.int(), "v": V.int()}, TypeError, ["int32", "float64"]),
    "float8": (
        {n: x.to(torch.float8_e4m3fn) for n, x in {"q": Q, "k": K, "v": V}.items()},
        TypeError,
        ["float8_e4m3fn"],
    ),
    "sparse": ({"q": Q.to_sparse()}, TypeError, ["q must be a dense strided tensor", "sparse_coo"]),
    "another device": ({"k": K.to("meta"), "v": V.to("meta")}, TypeError, ["same device", "q cpu", "k meta"]),
    # shapes
    "5-D": ({"q": Q[None], "k": K[None], "v": V[None]}, ValueError, ["4-D", "5-D", "(1, 2, 4, 5, 3)"]),
    "3-D": ({"q": Q[0], "k": K[0], "v": V[0]}, ValueError, ["4-D", "3-D"]),
    "k is 3-D": ({"k": K[0]}, ValueError, ["4-D", "3-D", "(2, 7, 3)"]),
    "batch": ({"q": Q[:1]}, ValueError, ["same batch size", "got 1, 2 and 2", "expand()"]),
    "batch of v": ({"v": V[:1]}, ValueError, ["same batch size", "got 2, 2 and 1"]),
    "head_dim": ({"k": torch.randn(B, HKV, NK, 4)}, ValueError, ["same head_dim", "got 3 and 4"]),
    "heads of v": ({"v": V[:, :1]}, ValueError, ["k and v", "heads", "got 2 and 1"]),
    "length of v shorter": ({"v": V[:, :, :6]}, ValueError, ["k and v", "same length", "got 7 and 6"]),
    "length of v longer": ({"v": torch.randn(B, HKV, 8, DV)}, ValueError, ["same length", "got 7 and 8"]),
    "heads no multiple": ({"q": Q[:, :3]}, ValueError, ["multiple", "got 3 and 2"]),
    "more key heads": ({"q": Q[:, :1]}, ValueError, ["multiple", "got 1 and 2"]),
    "no key heads": ({"k": K[:, :0], "v": V[:, :0]}, ValueError, ["multiple", "got 4 and 0"]),
    # mask, bias
    "mask of int64": (
        {"mask": ones(NQ, NK).long()},
        TypeError,
        ["mask must be bool", "True = may attend", "int64"],
    ),
    "mask of uint8": ({"mask": ones(NQ, NK).byte()}, TypeError, ["mask must be bool", "uint8"]),
    "mask is a list": ({"mask": [[True] * NK] * NQ}, TypeError, ["mask must be a torch.Tensor"]),
    "mask of another dtype": (
        {"mask": ones(NQ, NK).double()},
        TypeError,
        ["mask", "float32", "got torch.float64"],
    ),
    "mask too narrow": ({"mask": ones(NQ, 6) > 0}, ValueError, ["mask", "(2, 4, 5, 7)", "(5, 6)"]),
    "mask too wide": ({"mask": ones(NQ, 8) > 0}, ValueError, ["mask", "(2, 4, 5, 7)", "(5, 8)"]),
    "mask with wrong heads": ({"mask": ones(2, NQ, NK) > 0}, ValueError, ["mask", "(2, 5, 7)"]),
    "mask with wrong batch": ({"mask": ones(5, 1, NQ, NK) > 0}, ValueError, ["mask", "(5, 1, 5, 7)"]),
    "mask 5-D": ({"mask": ones(1, B, H, NQ, NK) > 0}, ValueError, ["mask", "(1, 2, 4, 5, 7)"]),
    "mask elsewhere": (
        {"mask": (ones(NQ, NK) > 0).to("meta")},
        TypeError,
        ["mask", "device of q, cpu", "meta"],
    ),
    "mask sparse": ({"mask": ones(NQ, NK).to_sparse()}, TypeError, ["mask must be a dense strided tensor"]),
    "mask is a CausalBias": (
        {"mask": causal_upper_left(NQ, NK)},
        TypeError,
        ["mask", "CausalBias", "causal="],
    ),
    "bias of bool": ({"bias": ones(NQ, NK) > 0}, TypeError, ["bias must be torch.float32", "got torch.bool"]),
    "bias of half": ({"bias": ones(NQ, NK).half()}, TypeError, ["bias", "got torch.float16"]),
    "bias shape": (
        {"bias": ones(H, NK, NQ)},
        ValueError,
        ["bias must broadcast", "(2, 4, 5, 7)", "(4, 7, 5)"],
    ),
    # per head
    "slopes shape": ({"alibi_slopes": ones(HKV)}, ValueError, ["alibi_slopes", "(4,) or (2, 4)", "got (2,)"]),
    "slopes 3-D": ({"alibi_slopes": ones(1, B, H)}, ValueError, ["alibi_slopes", "got (1, 2, 4)"]),
    "slopes dtype": ({"alibi_slopes": ones(H).long()}, TypeError, ["alibi_slopes", "int64"]),
    "slopes are a list": ({"alibi_slopes": [0.5] * H}, TypeError, ["alibi_slopes must be a torch.Tensor"]),
    "sinks shape": ({"sinks": ones(B, H)}, ValueError, ["sinks", "(4,)", "got (2, 4)"]),
    "sinks dtype": ({"sinks": ones(H).double()}, TypeError, ["sinks", "float32", "got torch.float64"]),
    "sinks elsewhere": ({"sinks": ones(H).to("meta")}, TypeError, ["sinks", "device of q"]),
    # lengths
    "key_lengths too long": (
        {"key_lengths": torch.tensor([7, 8])},
        ValueError,
        ["key_lengths", "between 0", "7, got 8"],
    ),
    "key_lengths list": ({"key_lengths": [7, 8]}, ValueError, ["key_lengths", "7, got 8"]),
    "key_lengths negative": ({"key_lengths": torch.tensor([-1, 3])}, ValueError, ["key_lengths", "got -1"]),
    "key_lengths shape": (
        {"key_lengths": torch.tensor([1, 2, 3])},
        ValueError,
        ["key_lengths", "(2,)", "(3,)"],
    ),
    "key_lengths 2-D": ({"key_lengths": torch.tensor([[1, 2]])}, ValueError, ["key_lengths", "(1, 2)"]),
    "key_lengths count": ({"key_lengths": [1]}, ValueError, ["key_lengths", "2 samples", "got 1"]),
    "key_lengths dtype": (
        {"key_lengths": torch.tensor([1.0, 2.0])},
        TypeError,
        ["key_lengths", "int64", "float32"],
    ),
    "key_lengths floats": (
        {"key_lengths": [1.0, 2.0]},
        TypeError,
        ["key_lengths", "list of int", "[1.0, 2.0]"],
    ),
    "key_lengths an int": ({"key_lengths": 3}, TypeError, ["key_lengths", "got 3"]),
    "key_lengths elsewhere": (
        {"key_lengths": torch.tensor([1, 2]).to("meta")},
        TypeError,
        ["key_lengths", "device of q, cpu"],
    ),
    "query_lengths too long": (
        {"query_lengths": [5, 6]},
        ValueError,
        ["query_lengths", "query length 5", "got 6"],
    ),
    # numbers and choices
    "dropout_p above 1": ({"dropout_p": 1.5}, ValueError, ["dropout_p", "between 0 and 1", "got 1.5"]),
    "dropout_p below 0": ({"dropout_p": -0.1}, ValueError, ["dropout_p", "between 0 and 1", "got -0.1"]),
    "dropout_p NaN": ({"dropout_p": math.nan}, ValueError, ["dropout_p", "between 0 and 1", "got nan"]),
    "dropout_p None": ({"dropout_p": None}, TypeError, ["dropout_p", "between 0 and 1", "None"]),
    "dropout_p tensor": ({"dropout_p": torch.tensor(0.1)}, TypeError, ["dropout_p", "Tensor"]),
    "scale NaN": ({"scale": math.nan}, ValueError, ["scale", "finite", "got nan"]),
    "scale inf": ({"scale": -math.inf}, ValueError, ["scale", "finite", "got -inf"]),
    "scale tensor": ({"scale": torch.tensor(0.5)}, TypeError, ["scale", "multiplies q", "Tensor"]),
    "softcap 0": ({"softcap": 0.0}, ValueError, ["softcap", "> 0", "got 0.0"]),
    "softcap negative": ({"softcap": -5}, ValueError, ["softcap", "> 0", "got -5"]),
    "softcap NaN": ({"softcap": math.nan}, ValueError, ["softcap", "> 0", "got nan"]),
    "softcap inf": ({"softcap": math.inf}, ValueError, ["softcap", "finite", "got inf"]),
    "causal string": (
        {"causal": "lower-right"},
        ValueError,
        ["causal", "'lower_right'", "got 'lower-right'"],
    ),
    "causal None": ({"causal": None}, ValueError, ["causal", "got None"]),
    "causal int": ({"causal": 1}, ValueError, ["causal", "got 1"]),
    "window int": ({"window": 4}, ValueError, ["window", "(left, right)", "(W - 1, 0)", "got 4"]),
    "window of three": ({"window": (1, 2, 3)}, ValueError, ["window", "pair", "(1, 2, 3)"]),
    "window negative": ({"window": (-2, 0)}, ValueError, ["window", ">= 0", "(-2, 0)"]),
    "window of floats": ({"window": (1.5, 0)}, ValueError, ["window", "integers", "(1.5, 0)"]),
    "window of bools": ({"window": (True, 0)}, ValueError, ["window", "integers"]),
    "return_weights": (
        {"return_weights": "mean"},
        ValueError,
        ["return_weights", "'mean_heads'", "got 'mean'"],
    ),
    "return_weights True": ({"return_weights": True}, ValueError, ["return_weights", "'full'", "got True"]),
    "deterministic": (
        {"deterministic": "yes"},
        ValueError,
        ["deterministic", "None, True or False", "'yes'"],
    ),
    "generator": ({"generator": 42, "dropout_p": 0.5}, TypeError, ["generator", "torch.Generator", "int"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name):
    """Bad input must not reach a kernel, where it would read out of bounds or compute something else."""
    changes, exception, words = WRONG[name]
    with pytest.raises(exception) as error:
        attention(**{"q": Q, "k": K, "v": V, **changes})
    assert type(error.value).__module__ == "attn_ext.arguments"  # ours, not one that happened further down
    for word in words:
        assert re.search(re.escape(word), str(error.value), re.IGNORECASE), str(error.value)


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR|quantize)")
@pytest.mark.parametrize("kind", ["csr", "nested", "jagged", "quantised", "mkldnn"])
def test_tensors_without_strides(kind):
    """A kernel would read their storage as if it were dense."""
    convert = {
        "csr": lambda t: t[0, 0].to_sparse_csr(),
        "nested": lambda t: torch.nested.nested_tensor([t[0], t[1, :, :2]]),
        "jagged": lambda t: torch.nested.nested_tensor([t[0, 0], t[1, 0, :2]], layout=torch.jagged),
        "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "mkldnn": lambda t: t.to_mkldnn(),
    }[kind]
    with pytest.raises(
        TypeError, match="qint8" if kind == "quantised" else "q must be a dense strided tensor"
    ):
        attention(convert(Q), convert(K), convert(V))


def test_generator_of_another_device():
    """A CPU generator cannot seed a mask on the GPU: torch's own error would come from deep inside."""

    class Elsewhere:  # a device of which this machine has none
        type = "cuda"

    from attn_ext import arguments

    with pytest.raises(TypeError, match="generator must be on the device of q"):
        arguments.rng_state(0.5, torch.Generator(), Elsewhere())


GOOD = {
    "scale 0": {"scale": 0},
    "scale negative": {"scale": -2.0},
    "window open": {"window": (None, -1)},
    "window as a list": {"window": [2, 0]},
    "window as large as integers go": {"window": (2**63 - 1, 2**63 - 1)},
    "lengths of 0 and all": {
        "key_lengths": [0, NK],
        "query_lengths": torch.tensor([NQ, 0], dtype=torch.int32),
    },
    "deterministic": {"deterministic": True},
    "dropout of int": {"dropout_p": 1},
    "generator": {"generator": torch.Generator(), "dropout_p": 0.5},
}


@pytest.mark.parametrize("name", GOOD)
def test_odd_but_legal(name):
    """Checks must not refuse what is well defined."""
    out = attention(Q, K, V, **GOOD[name])
    assert out.shape == (B, H, NQ, DV)
    assert out.isfinite().all()


PART = (torch.randn(B, H, NQ, DV), torch.randn(B, H, NQ))


@pytest.mark.parametrize(
    ("args", "exception", "words"),
    [
        ((*PART, PART[0][:, :2], PART[1][:, :2]), ValueError, ["one shape", "(2, 4, 5, 6)", "(2, 2, 5, 6)"]),
        ((*PART, PART[0], PART[0]), ValueError, ["lse1 and lse2 (..., N)", "(2, 4, 5, 6)"]),
        ((*PART, PART[0].double(), PART[1]), TypeError, ["one dtype", "torch.float64"]),
        (
            (PART[0], PART[1].half(), PART[0], PART[1].half()),
            TypeError,
            ["both float32 or both float64", "float16"],
        ),
        ((*PART, PART[0], None), TypeError, ["lse2 must be a torch.Tensor", "NoneType"]),
    ],
)
def test_wrong_parts_to_merge(args, exception, words):
    """Parts that broadcast by accident (a swapped out and lse) would merge to nonsense."""
    with pytest.raises(exception) as error:
        merge_attention(*args)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("mps", r"must be on the CPU or on a CUDA GPU, got mps:0"),
        ("cuda", r"are on cuda:0, and attn_ext's CUDA kernels are not built \(no nvcc\).*move the tensors"),
    ],
)
def test_tensors_on_a_device_without_kernels(function, device, words, monkeypatch):
    """torch would say that an operator is missing for a backend; it is a device that users chose."""
    monkeypatch.setattr(ops, "CUDA_PROBLEM", "not built (no nvcc)")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 1, 2, 4, device=device)  # fake: needs no such device
        with pytest.raises(TypeError, match=words):
            function(q, q, q)


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_shapes_are_known_for_tensors_on_a_gpu(function, monkeypatch):
    monkeypatch.setattr(ops, "CUDA_PROBLEM", "")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 1, 2, 4, device="cuda")
        out = function(q, q, q)
    assert (out.shape, out.device.type) == (q.shape, "cuda")
