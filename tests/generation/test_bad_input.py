"""
Every mistake a user can make raises ValueError or TypeError at the call or constructor, in a sentence with the
offending value, before a pass of either model; the models then still work and are as before.
"""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LogitsProcessor

from hf_specgen import (
    CacheLimits,
    CausalLMDrafter,
    Decoder,
    DecodingRules,
    LogitBias,
    PromptLookupDrafter,
    Request,
    disable_speculation,
    enable_speculation,
)
from tests.support.models import PAD, left_padded, make_model, noisy_copy

BATCH = left_padded([4, 2])
LOOKUP = {"assistant_model": None, "prompt_lookup_num_tokens": 3}
MASK = "attention_mask"


def case_name(value):
    """A short test id: names of arguments and of exceptions; words stand for themselves."""
    return ",".join(value) if isinstance(value, dict) else getattr(value, "__name__", None)


class Spoiler(LogitsProcessor):
    """Gives every token the same score, from a number of columns on."""

    def __init__(self, score, length=0):
        self.score, self.length = score, length

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.score) if input_ids.shape[1] >= self.length else scores


class Models:
    """An enabled model with its draft, and what has to stay as it is when a call is refused."""

    def __init__(self, plain):
        self.plain = plain
        self.target, self.draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
        self.num_forwards = 0
        self.check_that_all_is_well()
        for model in (self.target, self.draft):
            model.register_forward_pre_hook(self.count)

    def count(self, *args):
        self.num_forwards += 1

    def check_that_all_is_well(self):
        settings = {**left_padded([4, 2]), "max_new_tokens": 8}
        actual = self.target.generate(**settings, assistant_model=self.draft)
        assert actual.tolist() == self.plain.generate(**settings).tolist()

    def state(self):
        return [
            (
                [module.training for module in model.modules()],
                repr(model.config),
                model.config._attn_implementation,
                repr(model.generation_config),
                torch.get_rng_state().tolist(),
            )
            for model in (self.target, self.draft)
        ]

    def refuse(self, error, words, **arguments):
        """Expects a refusal whose text has `words`; gives back how many passes came before it."""
        call = {**BATCH, "assistant_model": self.draft, "max_new_tokens": 6, **arguments}
        before, self.num_forwards = self.state(), 0
        with pytest.raises(error, match=words):
            self.target.generate(**{name: value for name, value in call.items() if value is not None})
        assert self.state() == before
        num_forwards = self.num_forwards
        self.check_that_all_is_well()
        return num_forwards


@pytest.fixture(scope="module")
def models(llama):
    return Models(llama)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "`num_assistant_tokens`.* is 0", {"num_assistant_tokens": 0}),
        (ValueError, "`num_assistant_tokens`.* is -1", {"num_assistant_tokens": -1}),
        (TypeError, "`num_assistant_tokens`.* is True", {"num_assistant_tokens": True}),
        (TypeError, "`num_assistant_tokens`.* is 2.5", {"num_assistant_tokens": 2.5}),
        (TypeError, "`num_assistant_tokens`.* is nan", {"num_assistant_tokens": math.nan}),
        (ValueError, "`prompt_lookup_num_tokens`.* is 0", {**LOOKUP, "prompt_lookup_num_tokens": 0}),
        (TypeError, "`prompt_lookup_num_tokens`.* is 2.5", {**LOOKUP, "prompt_lookup_num_tokens": 2.5}),
        (ValueError, "`max_matching_ngram_size`.* is 0", {**LOOKUP, "max_matching_ngram_size": 0}),
        (TypeError, "`max_matching_ngram_size`.* is 1.5", {**LOOKUP, "max_matching_ngram_size": 1.5}),
        (ValueError, "`assistant_confidence_threshold`.* is -0.1", {"assistant_confidence_threshold": -0.1}),
        (ValueError, "`assistant_confidence_threshold`.* is 1.1", {"assistant_confidence_threshold": 1.1}),
        (ValueError, "`assistant_confidence_threshold`.* is nan", {"assistant_confidence_threshold": math.nan}),
        (ValueError, "`assistant_confidence_threshold`.* is '0.5'", {"assistant_confidence_threshold": "0.5"}),
        (ValueError, "'constant', 'heuristic'.* is 'linear'", {"num_assistant_tokens_schedule": "linear"}),
        (ValueError, "either `assistant_model` or `prompt_lookup", {"prompt_lookup_num_tokens": 3}),
        (ValueError, "`on_round` and `trace` need", {"assistant_model": None, "on_round": print}),
        (ValueError, "`on_round` and `trace` need", {"assistant_model": None, "trace": True}),
        (TypeError, "`on_round`.* is 3", {"on_round": 3}),
        (TypeError, "`assistant_model`.* is 'gpt2'", {"assistant_model": "gpt2"}),
        (TypeError, "`assistant_model`.* is 3", {"assistant_model": 3}),
        (TypeError, "`assistant_model`.*Linear", {"assistant_model": nn.Linear(2, 2)}),
    ],
    ids=case_name,
)
def test_assistant_settings(models, error, words, arguments):
    assert models.refuse(error, words, **arguments) == 0


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "the prompt is empty", {"input_ids": torch.zeros(1, 0, dtype=torch.long), MASK: None}),
        (ValueError, "empty row", {MASK: torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}),
        (ValueError, "Pad on the left", {MASK: torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}),
        (ValueError, "99.* 64 ids", {"input_ids": torch.tensor([[3, 99, 4, 5]]), MASK: None}),
        (ValueError, r"-100\]", {"input_ids": torch.tensor([[3, 4, 5, -100]]), MASK: None}),
        (ValueError, r"3\.0", {"input_ids": torch.tensor([[3.0, 4.0]]), MASK: None}),
        (ValueError, "`max_new_tokens`.* is 0", {"max_new_tokens": 0}),
        (TypeError, "has to be an int, but is 2.5", {"max_new_tokens": 2.5}),
        (TypeError, "has to be an int, but is 2.5", {"max_new_tokens": 2.5, "repetition_penalty": 1.5}),
        (ValueError, "`max_length` is set to 3", {"max_new_tokens": None, "max_length": 3}),
        (ValueError, r"`eos_token_id` \[99\].* 64 ids", {"eos_token_id": 99}),
        (ValueError, r"`eos_token_id` \[64\]", {"eos_token_id": [2, 64]}),
        (ValueError, r"`eos_token_id` \[-2\].*-1 for no end", {"eos_token_id": -2}),
        (ValueError, "`pad_token_id` 64.* 64 ids", {"pad_token_id": 64}),
        (ValueError, "`pad_token_id` -100", {"pad_token_id": -100}),
        (ValueError, "stop strings", {"stop_strings": ["a"]}),
        (ValueError, "`temperature`", {"do_sample": True, "temperature": 0.0}),
        (ValueError, "assistent_model", {"assistent_model": 1}),
    ],
    ids=case_name,
)
def test_inputs_and_budgets(models, error, words, arguments):
    assert models.refuse(error, words, **arguments) == 0


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("'beam_search'.*`num_beams=1`", {"num_beams": 2}),
        ("`guidance_scale`", {"guidance_scale": 1.5}),
        ("a quantized cache", {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
        ("`prefill_chunk_size`", {"prefill_chunk_size": 2}),
        ("`output_attentions`.*own loop", {"output_hidden_states": True, "return_dict_in_generate": True}),
        ("a `cache` is given.*own loop", {"cache": DynamicCache()}),
        ("'sliding_window'.*own loop", {"cache_implementation": "sliding_window"}),
        ("`assistant_ensemble_weight`.*own loop", {"assistant_ensemble_weight": 0.5}),
        (r"`position_ids`.*own loop", {"position_ids": torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])}),
    ],
    ids=case_name,
)
def test_settings_that_no_loop_serves_right(models, words, arguments):
    assert models.refuse(ValueError, words, **arguments) == 0


def test_input_embeddings_and_filled_caches(models):
    embeddings = models.plain.get_input_embeddings()(BATCH["input_ids"]).detach()
    assert models.refuse(ValueError, "`inputs_embeds`", inputs_embeds=embeddings) == 0
    assert models.refuse(ValueError, "`inputs_embeds`", inputs_embeds=embeddings, input_ids=None) == 0
    for ids in (BATCH["input_ids"], BATCH["input_ids"][:1]):
        cache = DynamicCache(config=models.plain.config)
        models.plain(ids[:, :2], cache=cache)
        assert models.refuse(ValueError, "`cache` is not empty", input_ids=ids, attention_mask=None, cache=cache) == 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("score", [-math.inf, math.nan])
def test_processor_that_leaves_no_token_is_named(models, score, do_sample):
    torch.manual_seed(0)
    words = "after 4 tokens of row 0: `Spoiler` masked"
    before = [LogitBias({5: 1.0}), Spoiler(score), LogitBias({6: 1.0})]
    models.refuse(ValueError, words, logits_processor=before)
    words = "after . tokens of row .: `Spoiler` masked"
    models.refuse(ValueError, words, logits_processor=[Spoiler(score, length=7)])


def test_vocabulary_of_another_tokenizer(models):
    assert models.refuse(ValueError, "64 ids.* 128", assistant_model=make_model(vocab_size=128)) == 0


def test_draft_model_without_a_head(models):
    assert models.refuse(TypeError, "`assistant_model`.*LlamaModel", assistant_model=models.draft.model) == 0


def test_batch_whose_rows_end_early_needs_something_to_fill_them_with():
    plain = make_model(pad_token_id=None, eos_token_id=None)
    plain.generation_config.pad_token_id = plain.generation_config.eos_token_id = None
    model, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    with pytest.raises(ValueError, match="`pad_token_id` or `eos_token_id`"):
        model.generate(**BATCH, assistant_model=draft, max_new_tokens=4, max_time=9e9)
    for batch in (BATCH, {"input_ids": BATCH["input_ids"][:1]}):
        actual = model.generate(**batch, assistant_model=draft, max_new_tokens=12)
        assert actual.tolist() == plain.generate(**batch, max_new_tokens=12).tolist()


def test_pad_id_outside_the_vocabulary_matters_in_a_batch_only(models):
    settings = {"pad_token_id": 64, "max_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True}
    one = {"input_ids": BATCH["input_ids"][:1]}
    actual = models.target.generate(**one, assistant_model=models.draft, **settings)
    assert actual.sequences.tolist() == models.plain.generate(**one, **settings).sequences.tolist()


@pytest.mark.parametrize("role", ["target", "draft model"])
def test_prompt_and_budget_beyond_the_learned_positions(llama, role):
    short = make_model("gpt2", max_position_embeddings=16)
    target, draft = (short, llama) if role == "target" else (llama, short)
    speculating = enable_speculation(copy.deepcopy(target))
    with pytest.raises(ValueError, match=f"17 tokens, but the {role} has learned positions for 16. Lower"):
        speculating.generate(**BATCH, assistant_model=draft, max_new_tokens=13)
    actual = speculating.generate(**BATCH, assistant_model=draft, max_new_tokens=12)
    assert actual.tolist() == target.generate(**BATCH, max_new_tokens=12).tolist()


def test_row_that_crosses_the_longrope_switch():
    plain = make_model("phi3_longrope")
    model, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    batch = left_padded([120, 100])
    with pytest.raises(ValueError, match="longrope.* passes 128 tokens.*come to 129.*one side"):
        model.generate(**batch, assistant_model=draft, max_new_tokens=9)
    actual = model.generate(**batch, assistant_model=draft, max_new_tokens=8)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=8).tolist()


# Constructors


@pytest.mark.parametrize("value", [None, "gpt2", 3, nn.Linear(2, 2)], ids=str)
def test_only_generating_models_are_enabled(value):
    for function in (enable_speculation, disable_speculation):
        with pytest.raises(TypeError, match=f"can generate, but got '{type(value).__name__}'"):
            function(value)


def test_model_without_a_head_is_not_enabled(llama):
    with pytest.raises(TypeError, match="'LlamaModel'"):
        enable_speculation(llama.model)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (ValueError, "`num_assistant_tokens`.* is 0", {"num_assistant_tokens": 0}),
        (TypeError, "`num_assistant_tokens`.* is '3'", {"num_assistant_tokens": "3"}),
        (ValueError, "`assistant_confidence_threshold`.* is 1.1", {"probability_threshold": 1.1}),
        (ValueError, "`assistant_confidence_threshold`.* is None", {"probability_threshold": None}),
        (ValueError, "`num_assistant_tokens_schedule`.* is 'x'", {"schedule": "x"}),
        (ValueError, "`temperature`.* is -1", {"temperature": -1}),
        (ValueError, "`temperature`.* is inf", {"temperature": math.inf}),
        (ValueError, "`temperature`.* is nan", {"temperature": math.nan}),
        (TypeError, "`temperature`.* is '1'", {"temperature": "1"}),
        (TypeError, "draft model.*'str'", {"model": "gpt2"}),
        (TypeError, "draft model.*'Linear'", {"model": nn.Linear(2, 2)}),
    ],
    ids=case_name,
)
def test_causal_lm_drafter(llama, error, words, settings):
    with pytest.raises(error, match=words):
        CausalLMDrafter(**{"model": llama} | settings)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (ValueError, "`num_assistant_tokens`.* is -2", {"num_assistant_tokens": -2}),
        (ValueError, "`max_matching_ngram_size`.* is 0", {"max_ngram_size": 0}),
        (TypeError, "`max_matching_ngram_size`.* is True", {"max_ngram_size": True}),
    ],
    ids=case_name,
)
def test_prompt_lookup_drafter(error, words, settings):
    with pytest.raises(error, match=words):
        PromptLookupDrafter(**settings)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (ValueError, "`prompt_ids` is empty", {"prompt_ids": []}),
        (TypeError, "`prompt_ids`.* is None", {"prompt_ids": None}),
        (ValueError, "`prompt_ids`.* is 'text'", {"prompt_ids": "text"}),
        (ValueError, r"`prompt_ids`.*\[3, -1\]", {"prompt_ids": [3, -1]}),
        (ValueError, r"`prompt_ids`.*\[3, 4.0\]", {"prompt_ids": [3, 4.0]}),
        (ValueError, r"`prompt_ids`.*\[3, True\]", {"prompt_ids": [3, True]}),
        (ValueError, "`max_new_tokens`.* is 0", {"max_new_tokens": 0}),
        (TypeError, "`max_new_tokens`.* is 2.5", {"max_new_tokens": 2.5}),
        (TypeError, "`max_new_tokens`.* is True", {"max_new_tokens": True}),
        (TypeError, "`seed`.* is '1'", {"seed": "1"}),
        (ValueError, "`seed`.* is -1", {"seed": -1}),
        (ValueError, "`seed`.* is 18446744073709551616", {"seed": 2**64}),
    ],
    ids=case_name,
)
def test_request(error, words, settings):
    with pytest.raises(error, match=words):
        Request(**{"prompt_ids": [3, 4], "max_new_tokens": 4} | settings)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (ValueError, "`max_batch_size`.* is 0", {"max_batch_size": 0}),
        (TypeError, "`max_batch_size`.* is True", {"max_batch_size": True}),
        (TypeError, "`max_batch_size`.* is 2.5", {"max_batch_size": 2.5}),
        (TypeError, "`limits`.* is 64", {"limits": 64}),
        (TypeError, "`on_round`.* is 'print'", {"on_round": "print"}),
        (TypeError, "`drafter`.*'str'", {"drafter": "gpt2"}),
        (TypeError, "`model`.*'str'", {"model": "gpt2"}),
    ],
    ids=case_name,
)
def test_decoder(llama, error, words, settings):
    with pytest.raises(error, match=words):
        Decoder(**{"model": llama} | settings)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (ValueError, "`capacity`.* is 0", {"capacity": 0}),
        (TypeError, "`capacity`.* is '64'", {"capacity": "64"}),
        (ValueError, "`max_tokens_in_cache`.* is 0", {"max_tokens_in_cache": 0}),
        (TypeError, "`prefill_chunk_size`.* is None", {"prefill_chunk_size": None}),
        (ValueError, "`prefill_chunk_size`.* is 0", {"prefill_chunk_size": 0}),
    ],
    ids=case_name,
)
def test_cache_limits(error, words, settings):
    with pytest.raises(error, match=words):
        CacheLimits(**settings)


def test_model_in_place_of_a_drafter(llama):
    with pytest.raises(TypeError, match="`drafter`.*'LlamaForCausalLM'.*`CausalLMDrafter`"):
        Decoder(llama, llama)


@pytest.mark.parametrize(
    ("error", "words", "request_"),
    [
        (ValueError, "64, but the model's vocabulary has 64 ids", Request([3, 64], 4)),
        (
            ValueError,
            r"`eos_token_ids`.*\[99\].* 64",
            Request([3], 4, DecodingRules(eos_token_ids=frozenset([2, 99]))),
        ),
        (TypeError, "`Request`.*'list'", [3, 4]),
    ],
    ids=["prompt", "eos", "type"],
)
def test_request_that_does_not_fit_the_model_is_refused_when_added(llama, error, words, request_):
    decoder = Decoder(llama)
    good = Request([3, 5, PAD], 4)
    decoder.add(good)
    with pytest.raises(error, match=words):
        decoder.add(request_)
    list(decoder.run([]))
    assert good.finish_reason == "length"
