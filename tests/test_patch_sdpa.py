"""attn_ext.patch_sdpa: code that calls torch's function runs on ours while it holds, and on torch's after."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from other_python import run_python
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ext

TORCHS = F.scaled_dot_product_attention
TORCHS_MHA = F.multi_head_attention_forward
BIAS_RULE = vars(torch.nn.attention.bias.CausalBias)["__torch_function__"]
F64 = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _torch_is_restored():
    yield
    assert F.scaled_dot_product_attention is TORCHS
    assert F.multi_head_attention_forward is TORCHS_MHA
    assert vars(torch.nn.attention.bias.CausalBias)["__torch_function__"] is BIAS_RULE


class Operators(TorchDispatchMode):
    """Counts calls of attn_ext's forward, and of torch's attention operators of any kind."""

    def __init__(self):
        super().__init__()
        self.ours = self.torchs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.ours += name.startswith("attn_ext.attention_forward")
        native = ("scaled_dot_product", "transformer_encoder_layer", "native_multi_head")
        self.torchs += any(part in name for part in native)
        return func(*args, **(kwargs or {}))


def counted(call):
    with Operators() as operators:
        call()
    return operators.ours, operators.torchs


Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)


def call():
    return F.scaled_dot_product_attention(Q, K, K)


# ---- install and restore ----


def test_as_a_function():
    assert counted(call) == (0, 1)
    patch = attn_ext.patch_sdpa()
    assert patch.active
    assert counted(call) == (1, 0)
    patch.undo()
    assert not patch.active
    assert counted(call) == (0, 1)
    patch.undo()  # no effect
    assert "undone" in repr(patch)


def test_as_a_context_manager_also_when_the_block_raises():
    patches = []

    def block():
        with attn_ext.patch_sdpa() as patch:
            patches.append(patch)
            assert patch.active
            assert counted(call) == (1, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert not patches[0].active


def test_nested_and_overlapping_patches():
    """The last one to go restores torch's function, whatever the order; one handle counts once."""
    first, second = attn_ext.patch_sdpa(), attn_ext.patch_sdpa()
    with attn_ext.patch_sdpa():
        assert counted(call) == (1, 0)
    first.undo()
    first.undo()
    assert counted(call) == (1, 0)
    assert F.scaled_dot_product_attention is not TORCHS
    second.undo()


def test_many_threads():
    """Patches that overlap between threads leave neither a call outside of them nor one behind."""
    errors = []

    def work(seed):
        try:
            for _ in range(30):
                with attn_ext.patch_sdpa():
                    assert F.scaled_dot_product_attention is not TORCHS
                    F.scaled_dot_product_attention(Q[:1, :1], K[:1, :1], K[:1, :1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_another_replacement_is_not_overwritten():
    """Restoring torch's function over what somebody else put there would lose theirs without a word."""
    patch = attn_ext.patch_sdpa()
    ours = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    for action in (patch.undo, attn_ext.patch_sdpa):
        with pytest.raises(RuntimeError, match=r"replaced by .*lambda.* taken back first"):
            action()
    assert F.scaled_dot_product_attention is theirs
    assert patch.active
    F.scaled_dot_product_attention = ours
    patch.undo()


def test_over_another_replacement():
    """What stood there before is restored, not torch's own."""
    F.scaled_dot_product_attention = theirs = lambda *args, **kwargs: TORCHS(*args, **kwargs)
    try:
        with attn_ext.patch_sdpa():
            assert counted(call) == (1, 0)
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = TORCHS


def test_imported_by_name():
    """Before the patch: out of its reach. While it held: torch's again afterwards."""
    with attn_ext.patch_sdpa():
        assert counted(lambda: imported_by_name(Q, K, K)) == (0, 1)
        from torch.nn.functional import scaled_dot_product_attention as late

        assert counted(lambda: late(Q, K, K)) == (1, 0)
    assert counted(lambda: late(Q, K, K)) == (0, 1)


def test_in_a_fresh_process():
    """torch.nn.attention.bias is not imported there yet, and the patch needs its class."""
    result = run_python(
        "-W", "ignore", "-c",
        "import torch, attn_ext, torch.nn.functional as F\n"
        "f = F.scaled_dot_product_attention\n"
        "attn_ext.patch_sdpa()\n"
        "q = torch.zeros(1, 1, 1, 1)\n"
        "print(F.scaled_dot_product_attention is f, f(q, q, q).item())\n",
    )  # fmt: skip
    assert result.stdout.split() == ["False", "0.0"], result.stderr


# ---- what goes through ----


def test_arguments_results_and_gradients():
    q, k, v = (torch.randn(2, h, n, d, **F64) for h, n, d in ((4, 5, 8), (2, 7, 8), (2, 7, 3)))
    mask = torch.randn(5, 7, **F64)
    inputs = [x.requires_grad_() for x in (q, k, v, mask)]
    results = []
    for patched in (False, True):
        with attn_ext.patch_sdpa() if patched else warnings.catch_warnings():
            out = F.scaled_dot_product_attention(*inputs, 0.0, False, scale=0.3, enable_gqa=True)
            named = F.scaled_dot_product_attention(
                query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=0.3,
                enable_gqa=True,
            )  # fmt: skip
        assert torch.equal(out, named)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8)])
def test_code_that_calls_view_on_the_result(shape):
    """The result lies in memory as query does, as torch's: where it did not, view() would raise."""
    q = torch.randn(shape)
    with attn_ext.patch_sdpa():
        out = F.scaled_dot_product_attention(q, q, q)
        assert out.view(-1, 5, 8).shape == (q.numel() // 40, 5, 8)
        heads_inside = torch.randn(2, 5, 4, 8).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads_inside, heads_inside, heads_inside)
        assert out.transpose(1, 2).is_contiguous()  # no copy there


def test_errors_are_ours():
    with attn_ext.patch_sdpa():
        with pytest.raises(ValueError, match="the same last dimension"):
            F.scaled_dot_product_attention(Q, K[..., :3], K)
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(Q, K, K, None, 0.0, False, 0.3)


@pytest.mark.parametrize("function", [imported_by_name, lambda *args: F.scaled_dot_product_attention(*args)])
def test_causal_bias(function):
    """Imported by name, torch's function would take a CausalBias for a tensor, whose storage is garbage."""
    bias = causal_lower_right(5, 7)
    expected, doubled = TORCHS(Q, K, K, bias), (bias * 2).shape
    with attn_ext.patch_sdpa():
        assert counted(lambda: function(Q, K, K, bias)) == (1, 0)
        torch.testing.assert_close(function(Q, K, K, bias), expected)
        assert (bias * 2).shape == doubled  # other functions follow the class's own rule


class Logged(torch.Tensor):
    """A subclass with rules of its own, one of them for torch's attention."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is TORCHS:
            return "handled"
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_what_is_left_to_torch():
    """Nested tensors, other devices, classes with a rule of their own: torch's function, and a warning."""
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    strided = torch.nested.nested_tensor(list(nested.unbind()))
    expected = [TORCHS(x, x, x) for x in nested.unbind()]
    logged = torch.randn(1, 1, 2, 4).as_subclass(Logged)
    with attn_ext.patch_sdpa():
        with pytest.warns(UserWarning, match="left to torch, an argument of .*NestedTensor"):
            out = F.scaled_dot_product_attention(nested, nested, nested)
        torch.testing.assert_close(list(out.unbind()), expected)
        with pytest.warns(UserWarning, match="left to torch, a nested tensor"):
            out = F.scaled_dot_product_attention(strided, strided, strided)
        torch.testing.assert_close(list(out.unbind()), expected)
        with pytest.warns(UserWarning, match="left to torch, an argument of .*Logged"):
            assert F.scaled_dot_product_attention(logged, logged, logged) == "handled"
        with pytest.warns(UserWarning, match="Proxy"):
            graph = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q))
    torch.testing.assert_close(graph(Q), TORCHS(Q, Q, Q))


@pytest.mark.parametrize("kind", [nn.Parameter, lambda x: x.as_subclass(Plain), lambda x: x.to("meta")])
def test_what_is_not_left_to_torch(kind):
    """Parameters, subclasses without a rule and meta tensors go to ours, without a warning."""
    x = kind(Q.clone())
    with warnings.catch_warnings(), attn_ext.patch_sdpa(), torch.no_grad():
        warnings.simplefilter("error")
        out = F.scaled_dot_product_attention(x, x, x)
        assert out.shape == Q.shape
        if x.device.type == "cpu":
            assert counted(lambda: F.scaled_dot_product_attention(x, x, x)) == (1, 0)
            torch.testing.assert_close(torch.Tensor(out), TORCHS(Q, Q, Q))


def test_under_a_function_mode():
    """torch.device is one; a mode must neither hide the patch nor be hidden."""
    with attn_ext.patch_sdpa(), torch.device("cpu"):
        assert counted(call) == (1, 0)


# ---- torch's modules ----

PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "both": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("mode", ["train", "eval", "eval without grad"])
@pytest.mark.parametrize("masks", MASKS)
def test_torchs_encoder(mode, masks):
    """Results and gradients; without gradients in eval torch's own operators step in until switched off."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **F64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(mode == "train")
    x = torch.randn(2, 5, 8, **F64)
    parameters = list(encoder.parameters())

    def run():
        with torch.set_grad_enabled("without grad" not in mode):
            out = encoder(x, **MASKS[masks])
        grads = torch.autograd.grad(out[~PADDING].sin().sum(), parameters) if out.requires_grad else ()
        return out[~PADDING], grads

    expected = run()
    with attn_ext.patch_sdpa():
        if mode == "eval without grad":
            assert counted(run) == (0, 2)
            torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert counted(run) == (2, 0)
            torch.testing.assert_close(run(), expected)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_torchs_multihead_attention_with_a_padded_sample():
    """Nothing attended gives 0; with need_weights=True torch does not call the function."""
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [True] * 5])
    with attn_ext.patch_sdpa():
        out, _ = module(x, x, x, padding, need_weights=False)
        torch.testing.assert_close(out[1], module.out_proj.bias.expand(5, 8))
        assert counted(lambda: module(x, x, x)) == (0, 0)
