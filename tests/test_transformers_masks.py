"""Masks and arguments between a model of transformers and its attention."""

import pytest
import torch
from transformers_models import (
    BERT,
    MODELS,
    VOCABULARY,
    B,
    N,
    difference,
    inputs_of,
    make_model,
    padding_of,
    run,
    transformers,
)

import attn_ext
from attn_ext.integrations import transformers as integration


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


HF = transformers.masking_utils
PATTERNS = {
    "causal": HF.causal_mask_function,
    "bidirectional": HF.bidirectional_mask_function,
    "window": HF.sliding_window_causal_mask_function(3),
    "two-sided window": HF.sliding_window_bidirectional_mask_function(2),
    "chunks": HF.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)),
    "packed": HF.and_masks(
        HF.causal_mask_function,
        HF.packed_sequence_mask_function((torch.arange(20) // 4).expand(2, -1)),
    ),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_mean_what_transformers_means(pattern):
    # Fault: a diagonal off by one for some cache, or padding that is cut at the wrong end.
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 12, 8)
    rules = 0
    sizes = [(5, 5, 0, 0), (5, 12, 7, 0), (5, 12, 0, 0), (5, 12, 3, 0), (1, 12, 11, 0), (1, 12, 4, 0)]
    sizes.append((3, 6, 8, 5))
    for len_q, len_k, q_offset, kv_offset in sizes:
        for lengths in (None, [20, 20], [20, 4], [6, 9], [-3, -9]):
            pad = None
            if lengths is not None:
                position = torch.arange(kv_offset + len_k)
                n = torch.tensor(lengths)[:, None]
                pad = torch.where(n > 0, position < n, position >= -n)
            arguments = {
                **{"batch_size": 2, "q_length": len_q, "kv_length": len_k},
                **{"q_offset": q_offset, "kv_offset": kv_offset},
                **{"mask_function": PATTERNS[pattern], "attention_mask": pad},
            }
            skip = {"allow_is_causal_skip": pattern != "bidirectional", "allow_is_bidirectional_skip": True}
            expected = HF.sdpa_mask(**arguments, allow_is_causal_skip=False)
            mask = integration.make_mask(**arguments, **skip)
            assert torch.equal(mask.dense(), expected)
            assert mask.shape == expected.shape
            rules += len_q > 1 and (mask.visible is None or mask.visible.shape[2] == 1)
            # The layer's view of it: the options, and the keys that are cut off.
            query, key = q[:, :, :len_q], k[:, :, :len_k]
            out, weights = integration.attention_forward(
                torch.nn.Identity(), query, key, key, mask, output_attentions=True
            )
            reference, p = attn_ext.attention(query, key, key, mask=expected, return_weights="full")
            torch.testing.assert_close(out.transpose(1, 2), reference)
            torch.testing.assert_close(weights, p)
    # As rules wherever the pattern is known; twice the diagonal is not one that a two-sided window can have.
    known = {"causal": 5, "bidirectional": 5, "window": 5, "two-sided window": 3, "chunks": 0, "packed": 0}
    assert rules == 5 * known[pattern]


def test_masks_hold_no_pairs(monkeypatch):
    # Fault: a mask of N x N pairs where rules would do.
    def forbidden(*args, **kwargs):
        raise AssertionError("a tensor of all pairs was made")

    monkeypatch.setattr(HF, "sdpa_mask", forbidden)
    monkeypatch.setattr(integration.AttentionMask, "dense", forbidden)
    for name in MODELS:
        for side in ("none", "right", "left"):
            inputs, _ = inputs_of(name, side)
            with torch.no_grad():
                make_model(name, "attn_ext")(**inputs)
    mask = integration.make_mask(2, N, N, attention_mask=padding_of("right")[:2])
    assert mask.visible is None
    assert mask.key_lengths.tolist() == [N, 5]


def test_masks_of_the_caller():
    # Fault: 4-D masks, bool or additive, and packed sequences that mean something else than with eager.
    ids = torch.randint(1, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(1))
    own = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(2)) < 0.5
    own = own | torch.eye(N, dtype=torch.bool)
    additive = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]]).expand(B, -1), "use_cache": False}
    for name in ("llama", "mistral"):
        ours, eager = make_model(name, "attn_ext"), make_model(name, "eager")
        with torch.no_grad():
            expected = eager(ids, attention_mask=additive).logits
            assert difference(ours(ids, attention_mask=additive).logits, expected) < 2e-5
            assert difference(ours(ids, attention_mask=own).logits, expected) < 2e-5
            expected = eager(ids, **packed).logits
            assert difference(ours(ids, **packed).logits, expected) < 2e-5
            assert difference(ours(ids, use_cache=False).logits, expected) > 1e-2


def test_a_mask_refuses_to_be_added():
    # Fault: a model without the attention interface adds True = 1.0 to its logits and goes on. MPNet is one,
    # and XGLM, which looks at the mask's size first.
    xglm = {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4, "vocab_size": VOCABULARY}
    for name, config in (("MPNet", BERT), ("XGLM", xglm)):
        config = getattr(transformers, f"{name}Config")(**config, attn_implementation="attn_ext")
        model = getattr(transformers, f"{name}Model")(config).eval()
        with pytest.raises(TypeError, match="computes with its attention mask"):
            model(input_ids=torch.ones(B, N, dtype=torch.long))

    mask = integration.make_mask(2, 3, 5, 2)
    scores = torch.zeros(2, 1, 3, 5)
    numbers = (
        lambda: scores + mask,
        lambda: scores.masked_fill(mask, 0),
        lambda: torch.where(mask, 0.0, 1.0),
        lambda: mask.to(torch.float32),
        lambda: mask[0, 0],
    )
    for make in numbers:
        with pytest.raises(TypeError, match="computes with its attention mask"):
            make()
    with pytest.raises(AttributeError, match="computes with its attention mask"):
        mask.float()
    # Cutting and combining gives masks again.
    dense = mask.dense()
    assert (mask.size(), mask.size(-1), mask.shape) == (dense.shape, 5, dense.shape)
    shared = [name for name in dir(mask) if name[0] != "_" and hasattr(dense, name)]
    assert all(callable(getattr(mask, name)) == callable(getattr(dense, name)) for name in shared)
    assert torch.equal(mask[:, :, :, :4].dense(), dense[..., :4])
    assert torch.equal((mask & dense.flip(-1)).dense(), dense & dense.flip(-1))
    assert torch.equal((dense.flip(-1) | mask).dense(), dense | dense.flip(-1))
    assert torch.equal(torch.cat([mask, dense], -1).dense(), torch.cat([dense, dense], -1))
    assert torch.equal(mask.to("cpu").dense(), dense)


class Layer(torch.nn.Module):
    is_causal = True


def forward(layer=None, mask=None, *, len_q=4, len_k=4, **options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=generator) for h, n in ((4, len_q), (2, len_k), (2, len_k)))
    return (q, k, v), integration.attention_forward(layer or Layer().eval(), q, k, v, mask, **options)


def test_no_mask_is_as_in_sdpa():
    # Fault: the other alignment, which lets the first queries see too much or decoding too little.
    for sizes in ((4, 4), (4, 9), (1, 9)):
        for causal in (None, True, False):
            (q, k, v), (out, weights) = forward(len_q=sizes[0], len_k=sizes[1], is_causal=causal)
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal is not False and sizes[0] > 1
            )
            torch.testing.assert_close(out, expected.transpose(1, 2))
            assert out.is_contiguous()
            assert weights is None


def test_learned_queries_serve_all_samples():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 5, 8)
    out, _ = integration.attention_forward(Layer(), q, k, k, None, is_causal=False)
    torch.testing.assert_close(out, attn_ext.attention(q.expand(2, -1, -1, -1), k, k).transpose(1, 2))


def test_unknown_keywords_are_refused():
    # Fault: an argument that changes the result is swallowed by **kwargs.
    for name, value in {"head_mask": torch.ones(4), "block_indices": 3, "sinks": torch.ones(4)}.items():
        with pytest.raises(TypeError, match=f"Layer passes {name} to its attention"):
            forward(**{name: value})
    forward(head_mask=None, use_cache=True, position_ids=torch.arange(4)[None], num_items_in_batch=3)
    try:
        integration.register(ignore=["tone"])
        ours = transformers.AttentionInterface()["attn_ext"]
        q = torch.randn(1, 1, 2, 4)
        ours(Layer(), q, q, q, None, tone="blue")
        with pytest.raises(TypeError, match="colour"):
            ours(Layer(), q, q, q, None, tone="blue", colour="red")
    finally:
        integration.register()


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match="has 4 queries and 4 keys, but its attention_mask was made for 3 and 4"
    ):
        forward(mask=integration.make_mask(2, 3, 4, 1))
    with pytest.raises(ValueError, match=r"must be 4-D.*got shape \(2, 4\)"):
        forward(mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="sliding_window=3 and got 4 keys, but no attention_mask"):
        forward(sliding_window=3)
    starts = torch.tensor([0, 2, 4, 8])
    for mask in (None, integration.make_mask(2, 4, 4)):
        with pytest.raises(ValueError, match="tells of 3 sequences in a batch of 2"):
            forward(mask=mask, cu_seq_lens_q=starts)
    forward(mask=torch.ones(1, 1, 4, 4, dtype=torch.bool), cu_seq_lens_q=starts)


def test_dropout_in_training_only():
    # Fault: dropout that is lost, applied in evaluation, or not undone in the mean.
    layer = Layer()
    _, (plain, _) = forward(layer.eval(), dropout=0.5)
    torch.testing.assert_close(plain, forward(layer)[1][0])
    layer.train()
    torch.manual_seed(0)
    drawn = torch.stack([forward(layer, dropout=0.5)[1][0] for _ in range(400)])
    assert (drawn[0] - drawn[1]).abs().max() > 0.1
    assert (drawn.mean(0) - plain).abs().max() < 6 * (drawn.std(0) / 20).max()

    inputs, real = inputs_of("bert", "left")
    model = make_model("bert", "attn_ext", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train()
    one, two = (run(model, inputs, real)[0] for _ in range(2))
    assert difference(one, two) > 1e-2
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
