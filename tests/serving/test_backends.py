"""Backends by name, and their settings."""

import pytest

from hf_specgen import CausalLMDrafter, DSparkDrafter, PromptLookupDrafter
from hf_specgen.serving import GenerationBackend
from hf_specgen.serving.backends import get_generation_backend
from tests.support.serving import KINDS, assert_answers, backend_of, greedy, random_prompts, target_of
from tests.support.tokenizers import TOKENIZER


def test_kinds_differ_by_width_and_drafter():
    backends = {kind: backend_of(kind) for kind in KINDS}
    assert all(type(backend) is GenerationBackend for backend in backends.values())
    decoders = {kind: backend._shared.decoder for kind, backend in backends.items()}
    assert {kind: len(decoder.rows.requests) for kind, decoder in decoders.items()} == {
        **dict.fromkeys(KINDS, 8),
        "eager": 1,
    }
    assert {kind: type(decoder.drafter) for kind, decoder in decoders.items()} == {
        "eager": type(None),
        "batched": type(None),
        "lookup": PromptLookupDrafter,
        "speculative": CausalLMDrafter,
        "dspark": DSparkDrafter,
    }


def test_backends_show_model_drafter_and_width():
    assert {kind: repr(backend_of(kind)) for kind in KINDS} == {
        kind: f"GenerationBackend(LlamaForCausalLM, drafter={drafter}, max_batch_size={1 if kind == 'eager' else 8}, "
        f"tokenizer={type(TOKENIZER).__name__})"
        for kind, drafter in {
            "eager": "None",
            "batched": "None",
            "lookup": "PromptLookupDrafter(num_assistant_tokens=5, max_ngram_size=3)",
            "speculative": "CausalLMDrafter(LlamaForCausalLM, num_assistant_tokens=3, probability_threshold=0.0, "
            "is_heuristic=False, temperature=1.0)",
            "dspark": "DSparkDrafter(DSparkModel, num_assistant_tokens=3, draft_length=VerifyAll(), "
            "is_calibrated=False)",
        }.items()
    }


@pytest.mark.parametrize("name", ["vllm", "", "Eager", None])
def test_unknown_backend_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"\['batched', 'dspark', 'eager', 'speculative'\], but is " + repr(name)):
        get_generation_backend(name, target_of(), TOKENIZER)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("eager", "max_batch_size"),
        ("eager", "prefill_chunk_size"),
        ("eager", "draft_model"),
        ("batched", "draft_model"),
        ("batched", "num_assistant_tokens"),
        ("batched", "assistant_confidence_threshold"),
        ("batched", "batch_size"),
        ("lookup", "max_length"),
        ("dspark", "temperature"),
    ],
)
def test_setting_that_a_kind_does_not_take_is_refused_by_name(kind, setting):
    with pytest.raises(ValueError, match=f"{kind.replace('lookup', 'speculative')}' has no setting `{setting}`"):
        backend_of(kind, **{setting: 1})


@pytest.mark.parametrize(
    ("kind", "settings", "error", "words"),
    [
        ("batched", {"max_batch_size": 0}, ValueError, "`max_batch_size`"),
        ("batched", {"max_batch_size": "8"}, TypeError, "`max_batch_size`"),
        ("eager", {"max_tokens_in_cache": 0}, ValueError, "`max_tokens_in_cache`"),
        ("batched", {"max_tokens_in_cache": 65}, ValueError, "`max_tokens_in_cache` has to be at least 66"),
        ("batched", {"mask_undecodable": "no"}, TypeError, "`mask_undecodable` has to be a bool, but is 'no'"),
        ("batched", {"prefill_chunk_size": None}, TypeError, "`prefill_chunk_size`"),
        ("lookup", {"num_assistant_tokens": 0}, ValueError, "has to be at least 1"),
        ("lookup", {"assistant_confidence_threshold": 0.5}, ValueError, "`assistant_confidence_threshold` needs"),
        ("speculative", {"assistant_confidence_threshold": 2.0}, ValueError, "`assistant_confidence_threshold`"),
        ("dspark", {"draft_model": None}, TypeError, "needs a `DSparkModel`"),
        ("dspark", {"num_assistant_tokens": 99}, ValueError, "`num_assistant_tokens` has to be at most"),
        ("speculative", {"draft_model": "gpt2"}, TypeError, "'gpt2'"),
    ],
)
def test_wrong_settings_are_refused_where_the_backend_is_made(kind, settings, error, words):
    with pytest.raises(error, match=words):
        backend_of(kind, **settings)


def test_draft_model_may_be_a_drafter():
    prompts, params = random_prompts(4, seed=2), greedy(24)
    backend = get_generation_backend("speculative", target_of(), TOKENIZER, draft_model=PromptLookupDrafter(2))
    assert_answers(backend.generate(prompts, params), prompts, [params] * 4)
    assert max(backend.stats.proposed) == 1
    with pytest.raises(ValueError, match="`num_assistant_tokens` is given, but"):
        get_generation_backend(
            "speculative", target_of(), TOKENIZER, draft_model=PromptLookupDrafter(2), num_assistant_tokens=3
        )


def test_model_and_tokenizer_of_wrong_types_are_refused():
    with pytest.raises(TypeError, match="transformers model .* but got 'str'"):
        get_generation_backend("batched", "gpt2", TOKENIZER)
    with pytest.raises(TypeError, match="`tokenizer` has to be a transformers tokenizer, but is a 'str'"):
        get_generation_backend("batched", target_of(), "gpt2")


def test_max_tokens_in_cache_of_a_backend():
    backend = backend_of("batched", max_tokens_in_cache=2 * 100)
    prompts, params = random_prompts(9, seed=14), greedy(12)
    assert_answers(backend.generate(prompts, params), prompts, [params] * 9)
    good, bad = backend.generate(["abc", "a" * 200], greedy(12))
    assert good.error is None and "`max_tokens_in_cache` is 200" in str(bad.error)
