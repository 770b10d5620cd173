"""PyTorch's own tests of attention, with ours in its place.

    python tests/run_torch_tests.py PYTORCH [pytest options, such as -k NAME]

PYTORCH is a checkout of its sources, best at the installed torch's version. Run on the CPU are
test/nn/test_multihead_attention.py, test/test_transformers.py, and the cases of transformers in
test/test_nn.py, with torch.nn.MultiheadAttention replaced and F.scaled_dot_product_attention patched.
A case of EXCEPTIONS may fail, and is named in the report when it passes (XPASS); any other must pass.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import activation, transformer

import attn_ext
from attn_ext.arguments import ArgumentTypeError, ArgumentValueError

FILES = ("nn/test_multihead_attention.py", "test_transformers.py", "test_nn.py")

# Names of cases, and why they fail: docs/migrating/multihead_attention.md and torch_sdpa.md tell more.
EXCEPTIONS = {
    "two_masks_fast_path_mock|mask_check_fastpath|disable_fastpath": "which path of torch's own is taken",
    "nested_tensor_outside_fast_path": "wants nested queries refused outside of the fast path; we take them",
    "test_transformerencoderlayer_cpu": "wants NaN of the fast path where all keys are padding; we give 0",
    "test_transformer_bias_is_none": "nn.TransformerEncoder's warning names _qkv_same_embed_dim first",
    "test_multihead_attention_average": "tells the layout of the weights by _qkv_same_embed_dim",
    "test_transformer_args_check": "wants AssertionErrors that are no RuntimeErrors, which all of ours are",
    "test_script|encoderlayer_subclass": "torch.jit.script",
    "test_train_with_is_causal": "wants is_causal without a mask refused; we take it as upper left",
    "dropout_p_0_[25]": "compares with F.dropout of the same seed; our generator makes another mask",
}

# In these, what runs under sdpa_kernel(MATH) is the reference: torch's function.
COMPARES_KERNELS = re.compile("vs_math|with_inf|backward_with_gradient|fully_masked_out_rows")


@contextlib.contextmanager
def raises(expected, pattern):
    """Passes if the block raises `expected` with that text, or an error of ours, whose text differs."""
    try:
        yield
    except (ArgumentTypeError, ArgumentValueError):
        return
    except expected as error:
        if re.search(pattern, str(error)):
            return
        raise
    raise AssertionError(f"{expected} not raised")


def assert_raises_regex(self, expected, pattern, function=None, *args, **kwargs):
    if function is None:
        return raises(expected, pattern)
    with raises(expected, pattern):
        function(*args, **kwargs)


def assert_raises(self, expected, function=None, *args, **kwargs):
    return assert_raises_regex(self, expected, "", function, *args, **kwargs)


class Substitution:
    """The pytest plugin: ours instead of torch's, and the exceptions."""

    def __init__(self):
        self.torchs = F.scaled_dot_product_attention
        attn_ext.patch_sdpa()
        self.ours, F.scaled_dot_product_attention = F.scaled_dot_product_attention, self.attention
        for module in (torch.nn, torch.nn.modules, activation, transformer):
            module.MultiheadAttention = attn_ext.MultiHeadAttention
        self.compares_kernels = False

    def attention(self, *args, **kwargs):
        reference = self.compares_kernels and not torch.backends.cuda.flash_sdp_enabled()
        return (self.torchs if reference else self.ours)(*args, **kwargs)

    def pytest_collection_modifyitems(self, config, items):
        others = [item for item in items if item.path.name == "test_nn.py" and "ransformer" not in item.name]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
        for item in items:
            item.cls.assertRaises, item.cls.assertRaisesRegex = assert_raises, assert_raises_regex
            for pattern, reason in EXCEPTIONS.items():
                if re.search(pattern, item.name):
                    item.add_marker(pytest.mark.xfail(reason=reason))

    def pytest_runtest_setup(self, item):
        self.compares_kernels = COMPARES_KERNELS.search(item.name) is not None


def main(checkout, *options):
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu"
    folder = Path(checkout, "test")
    arguments = [*(str(folder / name) for name in FILES), f"--rootdir={folder}", "-p", "no:cacheprovider"]
    return pytest.main([*arguments, "-q", "-rfExX", "--tb=short", *options], plugins=[Substitution()])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
