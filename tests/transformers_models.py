"""Tiny models of Hugging Face transformers with random weights, their inputs, and comparisons."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
transformers = pytest.importorskip("transformers", reason="the optional dependency transformers is missing")

VOCABULARY, B, N, FRAMES = 40, 3, 9, 6
WINDOW = 4  # less than N: otherwise a window would hide nothing
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TOKENS, **LAYERS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
BERT = {**LAYERS, "vocab_size": VOCABULARY, "pad_token_id": 0}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True}
GEMMA2 = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5}
GPT_OSS = {
    **{"num_local_experts": 2, "num_experts_per_tok": 1},
    "experts_implementation": "eager",  # another one multiplies in bfloat16
}
T5 = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
    **{"relative_attention_num_buckets": 6, "relative_attention_max_distance": 8},
}
WHISPER = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 4},
    **{"max_source_positions": FRAMES, "max_target_positions": 64, "decoder_start_token_id": 1},
    **{"begin_suppress_tokens": None, "suppress_tokens": None},
}
# name: (model class, config class, config)
MODELS = {
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bert decoder": ("BertLMHeadModel", "BertConfig", {**BERT, "is_decoder": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**TOKENS, **GPT2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, **ALTERNATING, **GEMMA2}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**DECODER, **ALTERNATING, **GPT_OSS}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**TOKENS, **T5}),
    "vit": (
        *("ViTForImageClassification", "ViTConfig"),
        {**LAYERS, "image_size": 12, "patch_size": 4, "num_labels": 5},
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**TOKENS, **WHISPER}),
}
# The other models take their softmax in float32 whatever they are in, where finfo.min of a float64 mask
# becomes -inf: their eager attention gives NaN in float64.
FLOAT64 = ("bert", "bert decoder", "gpt2", "gpt-oss", "t5", "whisper")


def dtype_of(name):
    return torch.float64 if name in FLOAT64 else torch.float32


def limit_of(name):
    """How far results may be from eager's, see :func:`difference`."""
    return 1e-11 if name in FLOAT64 else 2e-5


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
    decoder = {"decoder_input_ids": ids, "decoder_attention_mask": pad.long()}
    if name == "vit":
        pixels = torch.randn(B, 3, 12, 12, generator=generator, dtype=dtype_of(name))
        return {"pixel_values": pixels}, torch.ones(B, dtype=torch.bool)
    if name == "whisper":
        features = torch.randn(B, 4, 2 * FRAMES, generator=generator, dtype=dtype_of(name))
        return {"input_features": features, **decoder}, pad
    if name == "t5":
        encoder = torch.randint(1, VOCABULARY, (B, N), generator=generator)
        return {"input_ids": encoder, "attention_mask": pad.long(), **decoder}, pad
    mask = {} if side == "none" else {"attention_mask": pad.long()}
    return {"input_ids": ids, **mask}, pad


def run(model, inputs, real):
    """Outputs at real positions, and the gradients of all parameters of a weighted sum of them."""
    logits = model(**inputs).logits[real]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weight).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(a, b, least=1e-3):
    """Relative to b's largest element; where that is less than ``least``, to least."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(least)).item()
