"""Hugging Face transformers with attn_implementation="attn_ext": the results are those of "eager"."""

import pytest
import torch
from other_python import run_python
from transformers_models import MODELS, difference, inputs_of, limit_of, make_model, run, transformers

from attn_ext.integrations import transformers as integration


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


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
    assert difference(got, expected) < limit_of(name)
    # A gradient of float32 loses more where it sums over samples and positions.
    assert worst < 5 * limit_of(name)


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
    how = {**GENERATION[how], "do_sample": False, "max_new_tokens": 8}
    for implementation in ("eager", "attn_ext"):
        model = make_model(name, implementation)
        results.append(model.generate(**inputs, **how, output_scores=True, return_dict_in_generate=True))
    expected, got = results
    assert torch.equal(got.sequences, expected.sequences)
    worst = max(difference(a, b) for a, b in zip(got.scores, expected.scores, strict=True))
    assert worst < limit_of(name)


def test_output_attentions():
    # Fault: no weights, or those of keys in another place.
    for name, side in (("bert", "right"), ("llama", "left"), ("t5", "right")):
        inputs, real = inputs_of(name, side)
        with torch.no_grad():
            expected = make_model(name, "eager")(**inputs, output_attentions=True)
            got = make_model(name, "attn_ext")(**inputs, output_attentions=True)
        for key in ("attentions", "decoder_attentions", "cross_attentions"):
            for a, b in zip(got.get(key) or (), expected.get(key) or (), strict=True):
                assert difference(a.transpose(1, 2)[real], b.transpose(1, 2)[real]) < 1e-5
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
        assert difference(got, expected) < 2e-5
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
        assert difference(got.float(), expected) < 2 * difference(eager.float(), expected, 1e-3)


def test_register_is_idempotent_and_switches_models():
    integration.register()
    integration.register()
    model = make_model("llama", "eager")
    inputs, real = inputs_of("llama", "left")
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        model.set_attn_implementation("attn_ext")
        assert model.config._attn_implementation == "attn_ext"
        assert difference(model(**inputs).logits[real], expected) < 2e-5


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

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", old)
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

    monkeypatch.setattr(transformers.masking_utils, "sliding_window_overlay", sliding_window_overlay)
    with pytest.raises(RuntimeError, match="a mask pattern of transformers"):
        integration.register()
