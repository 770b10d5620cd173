"""Hugging Face transformers with attn_implementation="attn_ext": the results are those of "eager"."""

import os

import pytest
import torch
from other_python import run_python

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: models are tiny and have random weights
transformers = pytest.importorskip("transformers", reason="the optional dependency transformers is missing")

import attn_ext  # noqa: E402
from attn_ext.integrations import transformers as integration  # noqa: E402

VOCABULARY, B, N, FRAMES = 40, 3, 9, 6
WINDOW = 4  # less than N: otherwise a window would hide nothing
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
BERT = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")}
BERT |= {"num_hidden_layers": 2, "num_attention_heads": 4}
# name: (model class, config class, config)
MODELS = {
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bert decoder": ("BertLMHeadModel", "BertConfig", {**BERT, "is_decoder": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **DECODER,
            **{"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **DECODER,
            **{"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
            "experts_implementation": "eager",  # another one multiplies in bfloat16
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
            },
            **{"relative_attention_num_buckets": 6, "relative_attention_max_distance": 8},
            **{"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None},
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 12, "patch_size": 4, "num_labels": 5},
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 4},
            **{"max_source_positions": FRAMES, "max_target_positions": 64},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1},
            **{"begin_suppress_tokens": None, "suppress_tokens": None},
        },
    ),
}
# The other models take their softmax in float32 whatever they are in, where finfo.min of a float64 mask
# becomes -inf: their eager attention gives NaN in float64.
FLOAT64 = ("bert", "bert decoder", "gpt2", "gpt-oss", "t5", "whisper")


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def dtype_of(name):
    return torch.float64 if name in FLOAT64 else torch.float32


def make_model(name, implementation, **options):
    """A model whose weights are those of its name, large enough that attention weights are far from equal."""
    model_class, config_class, config = MODELS[name]
    config = getattr(transformers, config_class)(**{**config, **options}, attn_implementation=implementation)
    model = getattr(transformers, model_class)(config).eval().to(dtype_of(name))
    generator = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 or key.endswith(("bias", "sinks")):
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def padding_of(side):
    """(B, N), True = a token; the first sample has no padding."""
    lengths = torch.tensor([N, 5, 2])[:, None]
    j = torch.arange(N)
    return {
        "none": torch.ones(B, N, dtype=torch.bool),
        "right": j < lengths,
        "left": j >= N - lengths,
        "both": (j >= (N - lengths) // 2) & (j < N - (N - lengths + 1) // 2),
    }[side]


def inputs_of(name, side):
    """The model's inputs, and which of its outputs (B, N) belong to tokens."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, VOCABULARY, (B, N), generator=generator)
    pad = padding_of(side)
    if name == "vit":
        return {
            "pixel_values": torch.randn(B, 3, 12, 12, generator=generator, dtype=dtype_of(name))
        }, torch.ones(B, dtype=torch.bool)
    if name == "whisper":
        features = torch.randn(B, 4, 2 * FRAMES, generator=generator, dtype=dtype_of(name))
        return {
            "input_features": features,
            "decoder_input_ids": ids,
            "decoder_attention_mask": pad.long(),
        }, pad
    if name == "t5":
        encoder = torch.randint(1, VOCABULARY, (B, N), generator=generator)
        return {
            "input_ids": encoder,
            "attention_mask": pad.long(),
            "decoder_input_ids": ids,
            "decoder_attention_mask": pad.long(),
        }, pad
    mask = {} if side == "none" else {"attention_mask": pad.long()}
    return {"input_ids": ids, **mask}, pad


def run(model, inputs, real):
    """Outputs at real positions, and the gradients of all parameters of a weighted sum of them."""
    logits = model(**inputs).logits[real]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weight).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(a, b, least):
    """Relative to b's largest element; where that is less than ``least``, to least."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(least)).item()


CASES = [(name, side) for name in MODELS for side in ("none", "right", "left", "both")]
CASES = [case for case in CASES if case[0] != "vit" or case[1] == "none"]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_logits_and_gradients(name, side):
    # Fault: a mask, window, scale, cap, bias or sink that is lost or misread in one of the models.
    inputs, real = inputs_of(name, side)
    expected, expected_grads = run(make_model(name, "eager"), inputs, real)
    got, grads = run(make_model(name, "attn_ext"), inputs, real)
    least = 1e-2 * max(grad.abs().max() for grad in expected_grads.values())  # a key bias has gradient 0
    assert grads.keys() == expected_grads.keys()
    worst = max(difference(grads[k], expected_grads[k], least) for k in grads)
    limit = 1e-11 if name in FLOAT64 else 2e-5
    assert difference(got, expected, 1e-3) < limit
    assert worst < 5 * limit  # a gradient of float32 loses more where it sums over samples and positions


GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 4},
}
GENERATE = [(name, "greedy") for name in MODELS if name not in ("bert", "vit")]
GENERATE += [(name, "static") for name in ("gpt2", "llama", "mistral", "gemma2", "gpt-oss", "t5")]
GENERATE += [("t5", "beams"), ("mistral", "beams"), ("llama", "chunks"), ("mistral", "chunks")]


@pytest.mark.parametrize(("name", "how"), GENERATE)
def test_generate(name, how):
    # Fault: a diagonal that is off by the length of the cache, at the first step or at later ones.
    inputs, _ = inputs_of(name, "left")
    inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    results = []
    for implementation in ("eager", "attn_ext"):
        results.append(
            make_model(name, implementation).generate(
                **inputs,
                **GENERATION[how],
                do_sample=False,
                max_new_tokens=8,
                output_scores=True,
                return_dict_in_generate=True,
            )
        )
    expected, got = results
    assert torch.equal(got.sequences, expected.sequences)
    limit = 1e-11 if name in FLOAT64 else 2e-5
    worst = max(difference(a, b, 1e-3) for a, b in zip(got.scores, expected.scores, strict=True))
    assert worst < limit


# Masks


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
    sizes = [
        (5, 5, 0, 0),
        (5, 12, 7, 0),
        (5, 12, 0, 0),
        (5, 12, 3, 0),
        (1, 12, 11, 0),
        (1, 12, 4, 0),
        (3, 6, 8, 5),
    ]
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
            assert difference(ours(ids, attention_mask=additive).logits, expected, 1e-3) < 2e-5
            assert difference(ours(ids, attention_mask=own).logits, expected, 1e-3) < 2e-5
            expected = eager(ids, **packed).logits
            assert difference(ours(ids, **packed).logits, expected, 1e-3) < 2e-5
            assert difference(ours(ids, use_cache=False).logits, expected, 1e-3) > 1e-2


def test_a_mask_refuses_to_be_added():
    # Fault: a model without the attention interface adds True = 1.0 to its logits and goes on. MPNet is one.
    config = transformers.MPNetConfig(**BERT, attn_implementation="attn_ext")
    model = transformers.MPNetForMaskedLM(config).eval()
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
    assert torch.equal(mask[:, :, :, :4].dense(), dense[..., :4])
    assert torch.equal((mask & dense.flip(-1)).dense(), dense & dense.flip(-1))
    assert torch.equal((dense.flip(-1) | mask).dense(), dense | dense.flip(-1))
    assert torch.equal(torch.cat([mask, dense], -1).dense(), torch.cat([dense, dense], -1))
    assert torch.equal(mask.to("cpu").dense(), dense)


# What layers pass


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
    assert difference(one, two, 1e-3) > 1e-2
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# The rest of transformers


def test_output_attentions():
    # Fault: no weights, or those of keys in another place.
    for name, side in (("bert", "right"), ("llama", "left"), ("t5", "right")):
        inputs, real = inputs_of(name, side)
        with torch.no_grad():
            expected = make_model(name, "eager")(**inputs, output_attentions=True)
            got = make_model(name, "attn_ext")(**inputs, output_attentions=True)
        for key in ("attentions", "decoder_attentions", "cross_attentions"):
            for a, b in zip(got.get(key) or (), expected.get(key) or (), strict=True):
                assert difference(a.transpose(1, 2)[real], b.transpose(1, 2)[real], 1e-3) < 1e-5
        assert got.get("attentions") or got.get("cross_attentions")


def test_gradient_checkpointing():
    inputs, real = inputs_of("mistral", "left")
    expected, expected_grads = run(make_model("mistral", "attn_ext"), inputs, real)
    model = make_model("mistral", "attn_ext").train()
    model.gradient_checkpointing_enable()
    got, grads = run(model, inputs, real)
    torch.testing.assert_close(got, expected)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[key])


@pytest.mark.compile
def test_compile():
    # Fault: a graph break in the mask or attention function, or a mask that is frozen into the graph.
    import torch._dynamo.testing as dynamo_testing

    torch._dynamo.reset()
    model = make_model("llama", "attn_ext", num_hidden_layers=1)
    graphs = dynamo_testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for side in ("left", "right"):
        inputs, real = inputs_of("llama", side)
        expected, expected_grads = run(make_model("llama", "eager", num_hidden_layers=1), inputs, real)
        model.zero_grad()
        got, grads = run(compiled, inputs, real)
        assert difference(got, expected, 1e-3) < 2e-5
        least = 1e-2 * max(grad.abs().max() for grad in expected_grads.values())
        for key, grad in grads.items():
            assert difference(grad, expected_grads[key.removeprefix("_orig_mod.")], least) < 2e-5
    assert graphs.frame_count == 1


def test_half_types():
    # Fault: a mask or bias in a dtype that the kernels refuse.
    for name in ("llama", "t5"):
        inputs, real = inputs_of(name, "left")
        with torch.no_grad():
            expected = make_model(name, "eager").float()(**inputs).logits[real]
            got = make_model(name, "attn_ext").bfloat16()(**inputs).logits[real]
            eager = make_model(name, "eager").bfloat16()(**inputs).logits[real]
        assert difference(got.float(), expected, 1e-3) < 2 * difference(eager.float(), expected, 1e-3)


# Registration


def test_register_is_idempotent_and_switches_models():
    integration.register()
    integration.register()
    model = make_model("llama", "eager")
    inputs, real = inputs_of("llama", "left")
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        model.set_attn_implementation("attn_ext")
        assert model.config._attn_implementation == "attn_ext"
        assert difference(model(**inputs).logits[real], expected, 1e-3) < 2e-5


def test_import_does_not_need_transformers():
    # Fault: attn_ext cannot be imported without an optional library, or takes seconds to import one.
    code = """
import sys
sys.modules["transformers"] = None
from attn_ext.integrations import transformers
try:
    transformers.register()
except ImportError as error:
    print(error)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"needs transformers >= {integration.OLDEST}" in done.stdout


def test_old_transformers_are_refused(monkeypatch):
    def old(batch_size, cache_position, kv_length, kv_offset=0, mask_function=None):
        raise NotImplementedError

    monkeypatch.setattr(HF, "sdpa_mask", old)
    with pytest.raises(
        ImportError, match=f"needs transformers >= {integration.OLDEST}.*this is transformers"
    ):
        integration.register()


def test_patterns_of_another_meaning_are_refused(monkeypatch):
    # Fault: a later transformers counts a window differently, and the closure still looks the same.
    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    monkeypatch.setattr(HF, "sliding_window_overlay", sliding_window_overlay)
    with pytest.raises(RuntimeError, match="a mask pattern of transformers"):
        integration.register()
