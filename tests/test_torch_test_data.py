"""The inputs of PyTorch's own tests, which its wheel ships (torch.testing._internal), on our functions.

OpInfo: samples of an operator; ModuleInfo: constructor and forward arguments of a module. Torch's formula is
the reference, in float64 unless a dtype is under test.
"""

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext
from attn_ext import scaled_dot_product_attention

# Importing it forbids the whole process to set torch.backends' flags, which other tests do.
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

F64 = torch.float64


def op_info(name):
    (info,) = (op for op in op_db if op.name == name)
    return info


SDPA = op_info("nn.functional.scaled_dot_product_attention")
MHA = op_info("nn.functional.multi_head_attention_forward")
MODULES = {
    info.module_cls.__name__: info
    for info in module_db
    if "Transformer" in info.name or "Multihead" in info.name
}


def samples(dtype=F64, requires_grad=True):
    """[(tensors, options)]: query, key, value and, if given, attn_mask."""
    result = []
    for sample in SDPA.reference_inputs("cpu", dtype, requires_grad=requires_grad):
        options = dict(sample.kwargs)
        mask = options.pop("attn_mask", None)
        tensors = (sample.input, *sample.args) + (() if mask is None else (mask,))
        result.append((tensors, options))
    return result


SAMPLES = range(len(samples()))


def gradients(f, tensors, options):
    """(out, gradients) for one grad_out, whose values every dtype holds exactly."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = f(*tensors, **options)
    grad_out = (torch.arange(out.numel()) % 17 / 16 - 0.5).view_as(out).to(out.dtype)
    return out, *torch.autograd.grad(out, tensors, grad_out)


def test_opinfo_is_what_we_think():
    """A torch with error inputs or further dtypes makes this fail: they want tests then."""
    assert len(SAMPLES) >= 25
    assert SDPA.error_inputs_func is None
    assert SDPA.dtypes == {F64, torch.float32, torch.bfloat16, torch.float16}


def test_values_and_gradients():
    for tensors, options in samples():
        options["dropout_p"] = 0.0  # another generator makes another mask: see below
        ours = gradients(scaled_dot_product_attention, tensors, options)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = gradients(F.scaled_dot_product_attention, tensors, options)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def plain_formula(q, k, v, attn_mask=0.0, *, is_causal, dropout_p=0.0, enable_gqa=False):
    """In the inputs' dtype throughout. The samples with enable_gqa have as many key heads as query heads."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + attn_mask
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype):
    """The largest error of out and of each gradient: at most twice that of the formula in that dtype, plus
    1e-5. Over all samples together: each is small, its numbers lie between -9 and 9, its logits reach 200,
    so that most rows see one key only and the formula is exact there by luck."""
    errors = {}
    for tensors, options in samples(dtype):
        options["dropout_p"] = 0.0
        ours = gradients(scaled_dot_product_attention, tensors, options)
        plain = gradients(plain_formula, tensors, options)
        exact = gradients(plain_formula, [t.double() for t in tensors], options)
        for name, mine, other, truth in zip(("out", "q", "k", "v", "mask"), ours, plain, exact, strict=False):
            assert mine.dtype == dtype
            assert mine.shape == other.shape
            largest = [(x - truth).abs().max().item() for x in (mine, other)]
            errors[name] = [max(pair) for pair in zip(largest, errors.get(name, (0.0, 0.0)), strict=True)]
    assert len(errors) == 5
    for name, (mine, other) in errors.items():
        assert mine <= 2 * other + 1e-5, (name, mine, other)


@pytest.mark.parametrize("number", SAMPLES)
def test_gradcheck_and_gradgradcheck(number):
    """In float64: backward, forward mode, forward over reverse. With dropout the seed holds the mask."""
    tensors, options = samples()[number]
    batched = options.get("dropout_p", 0.0) == 0.0  # vmap draws another mask for each of its slices

    def f(*tensors):
        torch.manual_seed(0)
        return scaled_dot_product_attention(*tensors, **options)

    checks = {"fast_mode": True, "check_batched_grad": batched}
    forward = {"check_forward_ad": True, "check_batched_forward_grad": batched}
    assert torch.autograd.gradcheck(f, tensors, **checks, **forward)
    assert torch.autograd.gradgradcheck(f, tensors, **checks, check_fwd_over_rev=True)


def test_forward_mode_agrees_with_torchs_math_kernel():
    """For each choice of inputs that carry a tangent. OpInfo leaves forward mode out: torch's fused kernels
    have none."""
    assert not SDPA.supports_forward_ad
    torch.manual_seed(0)
    for tensors, options in samples(requires_grad=False):
        options["dropout_p"] = 0.0
        tangents = [torch.randn_like(t) for t in tensors]
        for moving in itertools.product([True, False], repeat=len(tensors)):
            if not any(moving):
                continue
            results = []
            for f in (scaled_dot_product_attention, F.scaled_dot_product_attention):
                with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
                    duals = [
                        forward_ad.make_dual(x, t) if moves else x
                        for x, t, moves in zip(tensors, tangents, moving, strict=True)
                    ]
                    results.append(tuple(forward_ad.unpack_dual(f(*duals, **options))))
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_dropout_has_the_mean_of_torchs_formula():
    """E[out] is out without dropout. 600 draws: their mean lies within 5 of its standard deviations."""
    torch.manual_seed(0)
    checked = 0
    for tensors, options in samples(requires_grad=False):
        if not options.get("dropout_p"):
            continue
        draws = torch.stack([scaled_dot_product_attention(*tensors, **options) for _ in range(600)])
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*tensors, **{**options, "dropout_p": 0.0})
        deviation = draws.std(0) / 600**0.5
        assert ((draws.mean(0) - expected).abs() <= 5 * deviation + 1e-12).all()
        assert (deviation > 0).any()
        checked += 1
    assert checked >= 12


@pytest.mark.compile
@pytest.mark.parametrize("number", SAMPLES)
def test_compiled(number):
    """Values and gradients as in eager code, with dropout the same mask for the same seed."""
    torch._dynamo.reset()
    tensors, options = samples()[number]
    results = []
    for f in (
        torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True),
        scaled_dot_product_attention,
    ):
        torch.manual_seed(0)
        results.append(gradients(f, tensors, options))
    torch.testing.assert_close(*results)


def test_samples_of_multi_head_attention_forward_under_the_patch():
    """It calls F.scaled_dot_product_attention where no weights are asked for. Without dropout."""
    checked = 0
    for sample in MHA.sample_inputs("cpu", F64):
        arguments, options = list(sample.args), dict(sample.kwargs)
        if arguments[9]:  # dropout_p
            continue
        options["need_weights"] = True
        expected = F.multi_head_attention_forward(sample.input, *arguments, **options)[0]
        options["need_weights"] = False
        with attn_ext.patch_sdpa():
            out, _ = F.multi_head_attention_forward(sample.input, *arguments, **options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        checked += 1
    assert checked >= 90


def without_dropout(module):
    """In float64. Dropout is random: another generator makes another mask."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, (nn.MultiheadAttention, attn_ext.MultiHeadAttention)):
            part.dropout = 0.0
    return module.double()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:Support for mismatched")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("how", ["replace_attention", "our class"])
def test_modules(how, name, training):
    """Every ModuleInfo input of torch.nn's attention and transformer modules: outputs and gradients."""
    info = MODULES[name]
    inputs = info.module_inputs_func(info, "cpu", F64, requires_grad=True, training=training)
    assert len(inputs) >= 30
    for number, each in enumerate(inputs):
        torch.manual_seed(0)
        arguments = each.constructor_input.args, each.constructor_input.kwargs
        theirs = without_dropout(info.module_cls(*arguments[0], **arguments[1])).train(training)
        if how == "replace_attention":
            ours = copy.deepcopy(theirs)
            assert attn_ext.replace_attention(ours).replaced
        else:
            cls = getattr(attn_ext, name.replace("Multihead", "MultiHead"))
            ours = without_dropout(cls(*arguments[0], **arguments[1])).train(training)
            ours.load_state_dict(theirs.state_dict())
        results = []
        for module in (theirs, ours):
            arguments = each.forward_input.args, each.forward_input.kwargs
            out = module(*arguments[0], **arguments[1])
            out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
            loss = sum(x.sin().sum() for x in out)
            grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
            results.append((out, grads))
        (out, grads), (out_ours, grads_ours) = results
        torch.testing.assert_close(
            out_ours, out, rtol=1e-10, atol=1e-10, equal_nan=True, msg=f"input {number}"
        )
        for a, b in zip(grads_ours, grads, strict=True):
            b = torch.zeros_like(a) if b is None else b  # torch leaves out projections that it did not use
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
