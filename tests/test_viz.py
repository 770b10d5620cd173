"""attn_ext.viz: captured weights are those that the model used; plots show what they are given."""

import importlib.util
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from matplotlib import font_manager
from other_python import run_python
from torch import nn

import attn_ext
from attn_ext import masks, viz
from attn_ext.masks import BlockMask


def module(**options):
    torch.manual_seed(0)
    return attn_ext.MultiHeadAttention(24, 4, batch_first=True, dtype=torch.float64, **options)


def inputs(length=5):
    return torch.randn(2, length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
ATTN_MASK = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({"num_kv_heads": 2, "qk_norm": "rms"}, {"key_padding_mask": PADDING}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING}),
        ({"window": (2, 0), "softcap": 3.0}, {"attn_mask": ATTN_MASK}),
        ({"position": attn_ext.RotaryEmbedding(6), "add_bias_kv": True}, {}),
        ({"position": attn_ext.ALiBi(4), "num_kv_heads": 2}, {"is_causal": True}),
        (
            {"position": attn_ext.T5RelativePositionBias(4, dtype=torch.float64)},
            {"key_padding_mask": PADDING},
        ),
        ({}, {"attn_mask": torch.randn(8, 5, 5, dtype=torch.float64)}),  # of each sample and head
        ({}, {"is_causal": True, "attn_mask": ATTN_MASK}),
        ({"num_kv_heads": 2}, {"block_mask": masks.big_bird(5, 1, 1, 1, 1, heads=4)}),
        ({"add_bias_kv": True}, {"block_mask": masks.causal(5), "key_padding_mask": PADDING}),
        ({}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}),  # nobody sees anything
    ],
)
def test_captured_weights_are_the_weights(options, call):
    mha, x = module(**options), inputs()
    _, expected = mha(x, x, x, average_attn_weights=False, **call)
    maps = viz.capture_attention(mha, x, x, x, need_weights=False, **call)
    [found] = maps.values()
    assert list(maps) == ["MultiHeadAttention"]
    assert found.shape == expected.shape
    torch.testing.assert_close(found.weights(), expected)
    torch.testing.assert_close(found.weights(2), expected[:, 2])
    torch.testing.assert_close(found.weights([3, -4]), expected[:, [3, 0]])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_a_model_is_left_as_it_was(compiled):
    """Same output, same attributes, no hooks; the order of the maps is that of the calls."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attn_ext.replace_attention(model)
    run = torch.compile(model, backend="eager") if compiled else model
    before = run(inputs())
    attributes = [dict(vars(m)) for m in model.modules()]
    outputs = []
    handle = model.register_forward_hook(lambda module, args, out: outputs.append(out))
    maps = viz.capture_attention(run, inputs())
    handle.remove()
    prefix = "_orig_mod." if compiled else ""
    assert list(maps) == [f"{prefix}layers.{n}.self_attn" for n in range(2)]
    torch.testing.assert_close(outputs, [before])
    assert [dict(vars(m)) for m in model.modules()] == attributes


def test_a_module_that_is_called_twice_has_two_maps():
    mha = module()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = mha

        def forward(self, x):
            y, _ = self.attention(x, x, x)
            return self.attention(y, x, x)[0]

    maps = viz.capture_attention(Twice(), inputs())
    assert list(maps) == ["attention", "attention #2"]
    y, first = mha(*[inputs()] * 3, average_attn_weights=False)
    torch.testing.assert_close(maps["attention"].weights(), first)
    _, second = mha(y, inputs(), inputs(), average_attn_weights=False)
    torch.testing.assert_close(maps["attention #2"].weights(), second)


def test_weights_are_before_dropout():
    mha = module(dropout=0.5)
    [found] = viz.capture_attention(mha, *[inputs()] * 3).values()
    torch.testing.assert_close(found.weights().sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))


def test_a_call_that_fails_leaves_nothing_behind():
    mha = module()
    with pytest.raises(ValueError, match="query"):
        viz.capture_attention(mha, torch.randn(1), torch.randn(1), torch.randn(1))
    assert "_attend" not in vars(mha)
    assert not mha._forward_pre_hooks


def test_errors_of_capturing():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        viz.capture_attention("model")
    with pytest.raises(ValueError, match=r"replace_attention"):
        viz.capture_attention(nn.MultiheadAttention(8, 2), *[torch.randn(1, 3, 8)] * 3)
    unused = nn.Linear(24, 24, dtype=torch.float64)
    unused.attention = module()
    with pytest.raises(ValueError, match="called none of its 1 attention modules"):
        viz.capture_attention(unused, inputs())
    [found] = viz.capture_attention(module(), *[inputs()] * 3).values()
    with pytest.raises(ValueError, match=r"heads must lie in 0 \.\.\. 3, got 4"):
        found.weights(4)


def pictures(figure):
    """(title, values, labels of the queries, labels of the keys) of each visible map."""
    figure.canvas.draw()
    shown = []
    for ax in figure.axes:
        if ax.get_visible() and ax.images and not hasattr(ax, "_colorbar"):
            labels = [[t.get_text() for t in axis.get_ticklabels()] for axis in (ax.yaxis, ax.xaxis)]
            shown.append((ax.get_title(), ax.images[0].get_array(), *labels))
    return shown


def test_one_head():
    weights = torch.rand(3, 4)
    figure = viz.plot_attention(weights, list("abc"), list("wxyz"), title="one")
    [(_, values, queries, keys)] = pictures(figure)
    torch.testing.assert_close(torch.from_numpy(values.data), weights)
    assert (queries, keys) == (list("abc"), list("wxyz"))
    assert figure.get_suptitle() == "one"


def test_grids():
    titles = [title for title, *_ in pictures(viz.plot_attention(torch.rand(3, 4, 4)))]
    assert titles == ["head 0", "head 1", "head 2"]
    layers = [torch.rand(2, 4, 4), torch.rand(1, 3, 5)]  # of different sizes
    assert [title for title, *_ in pictures(viz.plot_attention(layers))] == [
        "layer 0, head 0", "layer 0, head 1", "layer 1, head 0"
    ]  # fmt: skip
    many = viz.plot_attention(torch.rand(20, 2, 2), max_heads=5)
    assert len(pictures(many)) == 5
    assert many.get_suptitle() == "attention (the first 5 of 20 heads)"


def test_captured_maps_are_plotted_by_layer_and_head():
    maps = viz.capture_attention(module(), *[inputs()] * 3)
    shown = pictures(viz.plot_attention(maps, list("abcde")))
    assert len(shown) == 4
    expected = maps["MultiHeadAttention"].weights()[0]
    for n, (_, values, queries, keys) in enumerate(shown):
        torch.testing.assert_close(torch.from_numpy(values.data), expected[n])
        assert queries == keys == list("abcde")


def test_long_sequences_label_every_nth_token():
    tokens = [f"t{n}" for n in range(100)]
    [(_, _, queries, keys)] = pictures(viz.plot_attention(torch.rand(100, 100), tokens))
    assert queries == keys == tokens[::3]


@pytest.mark.parametrize(("tokens", "rotation"), [(["ab", "c"], 0), (["abc", "c"], 90)])
def test_long_labels_of_keys_are_turned(tokens, rotation):
    ax = viz.plot_attention(torch.rand(2, 2), tokens).axes[0]
    assert {label.get_rotation() for label in ax.get_xticklabels()} == {rotation}


@pytest.mark.parametrize("as_float", [False, True])
def test_masks_have_two_colours(as_float):
    mask = torch.ones(3, 3).tril().bool()
    given = torch.zeros(3, 3).masked_fill(~mask, -math.inf) if as_float else mask
    [(_, values, _, _)] = pictures(viz.plot_mask(given))
    assert values.tolist() == mask.int().tolist()


def test_masks_with_values_have_a_scale():
    mask = torch.tensor([[0.0, -1.0], [-math.inf, 2.0]], dtype=torch.float16)
    figure = viz.plot_mask(mask[None].expand(2, 2, 2))
    shown = pictures(figure)
    assert [title for title, *_ in shown] == ["head 0", "head 1"]
    assert shown[0][1].filled(-9).tolist() == [[0.0, -1.0], [-9.0, 2.0]]


def test_block_masks_have_three_shades():
    """Blocks of the first sample, for each head, along axes that count positions; elements with tokens."""
    heads = torch.tensor([[[True]], [[False]]])
    mask = BlockMask.from_blocks(heads, 150, 150, 150) & masks.prefix_lm(150, [0, 130])
    figure = mask.plot(title="causal")
    assert figure.get_suptitle() == "causal"
    shown = pictures(figure)
    assert [title for title, *_ in shown] == ["head 0", "head 1"]
    assert shown[0][1].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    assert shown[1][1].tolist() == [[0] * 3] * 3
    assert (figure.axes[0].get_xlim(), figure.axes[0].get_ylim()) == ((0, 150), (150, 0))
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["full", "partial", "hidden"]
    [(_, values, queries, _)] = pictures(viz.plot_mask(masks.causal(3), list("abc")))
    assert values.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert queries == list("abc")


def test_positions():
    encoding = torch.rand(6, 8)
    [(_, values, _, _)] = pictures(viz.plot_positions(encoding))
    torch.testing.assert_close(torch.from_numpy(values.data), encoding)
    bias = torch.rand(1, 2, 3, 5)
    lines = viz.plot_positions(bias).axes[0].lines
    assert [line.get_xdata().tolist() for line in lines] == [[-4, -3, -2, -1, 0]] * 2
    torch.testing.assert_close(
        torch.stack([torch.as_tensor(line.get_ydata()) for line in lines]), bias[0, :, -1]
    )


@pytest.mark.parametrize(
    ("plot", "problem"),
    [
        (lambda: viz.plot_attention(torch.rand(2, 2), ["a"]), r"tokens must have 2 strings.*got 1"),
        (lambda: viz.plot_attention(torch.rand(2, 3), list("ab"), ["a"]), r"key_tokens must have 3 strings"),
        (lambda: viz.plot_attention(torch.rand(2)), r"weights must be \(Nq, Nk\)"),
        (lambda: viz.plot_attention(torch.rand(0, 2)), r"none of them 0"),
        (lambda: viz.plot_attention([]), r"\(H, Nq, Nk\) for each layer"),
        (lambda: viz.plot_mask(torch.ones(2)), r"mask must be \(Nq, Nk\)"),
        (lambda: masks.causal(0).plot(), r"no axis of size 0, got \(1, 1, 0, 0\)"),
        (lambda: viz.plot_positions(torch.ones(2, 2, 2, 2)), r"positions must be \(N, D\)"),
        (lambda: viz.plot_attention([[0.5]]), r"weights must be a torch.Tensor, got list"),
    ],
)
def test_errors_of_plots(plot, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        plot()


def test_every_script_is_drawn(tmp_path):
    """What matplotlib's font lacks comes from another installed font; without one there is a warning."""
    # A package with a font that has Chinese characters. Not imported: that would make its font the first.
    package = importlib.util.find_spec("matplotlib_fontja").submodule_search_locations[0]
    [path] = Path(package).rglob("ipaexg.ttf")
    tokens = list("注意力 is 機構")
    weights = torch.rand(len(tokens), len(tokens))
    before = list(font_manager.fontManager.ttflist)
    try:
        font_manager.fontManager.addfont(str(path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # matplotlib warns of glyphs that are missing
            viz.plot_attention(weights, tokens, title="注意").savefig(tmp_path / "picture.png")
    finally:
        font_manager.fontManager.ttflist[:] = before
    assert (tmp_path / "picture.png").stat().st_size > 5000
    with pytest.warns(UserWarning, match="no installed font has \U000f0000: they are drawn as boxes"):
        viz.plot_attention(torch.rand(1, 1), ["\U000f0000"])


def test_capturing_needs_no_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch, attn_ext, attn_ext.viz as viz\n"
        "x = torch.randn(1, 3, 64)\n"
        "maps = viz.capture_attention(attn_ext.MultiHeadAttention(64, 2), x, x, x)\n"
        "print(maps)\n"
        "viz.plot_attention(maps)\n"
    )
    done = run_python("-c", code)
    assert "AttentionMap(batch 3, heads 2, 1 x 1)" in done.stdout
    assert "ImportError: the plots of attn_ext.viz need `pip install matplotlib`" in done.stderr


def test_the_gallery_is_drawn_by_its_script(tmp_path):
    """All pictures that docs/gallery.md shows, and no others; these come from a model that learned little."""
    docs = Path(__file__).parents[1] / "docs"
    done = run_python(docs / "gallery.py", "--steps", "2", "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = set(re.findall(r"\(gallery/(.*?)\)", (docs / "gallery.md").read_text(encoding="utf-8")))
    assert drawn == shown == {path.name for path in (docs / "gallery").iterdir()}
    assert "drawn as boxes" not in done.stderr
