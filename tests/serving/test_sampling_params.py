import copy
import dataclasses
import pickle
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specgen import (
    CausalLMDrafter,
    Decoder,
    DecodingRules,
    DecodingStats,
    LogitBias,
    Request,
    TokenPenalties,
    UndecodableMask,
)
from hf_specgen.serving.request_error import RequestError
from hf_specgen.serving.sampling_params import SamplingParams, mixed_seed
from tests.support.models import EOS, PAD, VOCAB_SIZE, assert_partly_accepted, cycle_model, noisy_copy
from tests.support.sampling import extra_processors, generation_config

INF, NAN = float("inf"), float("nan")
EOS_IDS = [EOS, 19]


def random_params(seed: int, **fixed: Any) -> SamplingParams:
    """Every setting that has a say in the scores, on or off."""
    draw = random.Random(seed)
    settings: dict[str, Any] = {
        "temperature": draw.choice([0, 0.7, 1.0, 2.5]),
        "top_k": draw.choice([None, 0, 5, 30]),
        "top_p": draw.choice([1, 0.9, 0.5]),
        "min_p": draw.choice([0, 0.05]),
        "repetition_penalty": draw.choice([1, 1.3, 2, 0.8]),
        "frequency_penalty": draw.choice([0, 0.5, -1]),
        "presence_penalty": draw.choice([0, 1.5]),
        "penalty_scope": draw.choice([None, "all", "generated"]),
        "logit_bias": draw.choice([None, {"12": 3, 7: -INF, str(EOS): 2.0}]),
        "stop_token_ids": draw.choice([(), (25, 33)]),
        "ignore_eos": draw.choice([True, False]),
        "min_new_tokens": draw.choice([0, 4]),
        "max_new_tokens": 24,
    }
    return SamplingParams(**{**settings, **fixed})


# What is refused, and what becomes of the rest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", 1e-6),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", NAN),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", NAN),
        ("repetition_penalty", INF),
        ("frequency_penalty", NAN),
        ("frequency_penalty", INF),
        ("presence_penalty", NAN),
        ("presence_penalty", -INF),
        ("penalty_scope", "prompt"),
        ("penalty_scope", 1),
        ("logprobs_mode", "raw_logprobs"),
        ("logprobs_mode", None),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1": NAN}),
        ("logit_bias", {"1": 1, 1: 2}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [3, -1]),
        ("min_new_tokens", -1),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("n", 0),
        ("logprobs", -1),
        # What a client may choose is bounded.
        ("max_new_tokens", 2**70),
        ("min_new_tokens", 2**70),
        ("top_k", 2**70),
        ("seed", -(2**70)),
        ("n", 4097),
        ("n", 2**70),
        ("logprobs", 1025),
        ("stop", "a" * 16_385),
        ("stop", ["a" * 10**6, "b" * 10**6, "c" * 10**6, "d" * 10**6]),
        ("stop", ["a"] * 16_385),
        # Halves of surrogate pairs
        ("stop", "a\ud800"),
        ("stop", ["x", "\udfff"]),
    ],
)
def test_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"^`{field}`") as raised:
        SamplingParams(**{field: value})
    assert (raised.value.code, raised.value.param) == ("invalid_value", field)
    assert len(str(raised.value)) < 400


def test_error_tells_the_rule_and_the_value():
    with pytest.raises(ValueError, match="`top_p` has to be above 0 and at most 1, but is 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="`min_new_tokens` has to be at most `max_new_tokens` .3., but is 4"):
        SamplingParams(max_new_tokens=3, min_new_tokens=4)
    with pytest.raises(ValueError, match="`logit_bias` .*'abc'"):
        SamplingParams(logit_bias={"abc": 1})


@pytest.mark.parametrize("value", [True, "1", [1], 1j])
@pytest.mark.parametrize(
    "field",
    [
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "min_new_tokens",
        "seed",
        "n",
        "logprobs",
    ],
)
def test_value_of_another_type_is_refused_by_name(field, value):
    with pytest.raises(TypeError, match=f"^`{field}`") as raised:
        SamplingParams(**{field: value})
    assert isinstance(raised.value, RequestError)
    assert (raised.value.code, raised.value.param) == ("invalid_type", field)


@pytest.mark.parametrize("field", ["max_new_tokens", "top_k", "min_new_tokens", "seed", "n", "logprobs"])
def test_fraction_is_no_count(field):
    value: Any = 2.0
    with pytest.raises(TypeError, match=f"^`{field}`"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", None),
        ("tools", "look"),
        ("tools", [5]),
        ("documents", {"title": "a"}),
        ("documents", ["a"]),
        ("chat_template_kwargs", [("a", 1)]),
        ("chat_template_kwargs", {5: 1}),
        ("continue_final_message", 1),
        ("stop", None),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", {"a"}),
        ("stop_token_ids", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("logit_bias", [(1, 2)]),
        ("logit_bias", {1.5: 2}),
        ("logit_bias", {1: "2"}),
    ],
)
def test_other_wrong_types_are_refused_by_name(field, value):
    with pytest.raises(TypeError, match=f"^`{field}`"):
        SamplingParams(**{field: value})


def test_unknown_field_and_positions_are_refused():
    build: Any = SamplingParams
    with pytest.raises(TypeError, match="temprature"):
        build(temprature=1.0)
    with pytest.raises(TypeError):
        build(5)


def test_values_are_brought_to_one_form():
    params = SamplingParams(temperature=1, top_k=None, stop="###", stop_token_ids=[3], logit_bias={"5": 2})
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (1.0, 0, ("###",), (3,))
    assert type(params.temperature) is float
    assert params.logit_bias == {5: 2.0}
    assert SamplingParams(logit_bias={}) == SamplingParams()
    half: Any = Fraction(1, 2)
    assert SamplingParams(top_p=half).top_p == 0.5
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(min_new_tokens=2560).max_new_tokens is None
    assert SamplingParams(n=np.int64(3), stop_token_ids=np.array([4, 5]), top_p=np.float32(0.5)) == SamplingParams(
        n=3, stop_token_ids=(4, 5), top_p=0.5
    )
    assert SamplingParams(tools=[], documents=(), chat_template_kwargs={}) == SamplingParams()


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**32, 2**64 - 1])
def test_seeds_of_64_bits_are_taken(seed):
    assert SamplingParams(seed=seed).seed == seed


def test_seeds_and_samples_are_mixed():
    """Neighbouring seeds have no sample in common, and all bits of a seed count."""
    seeds = [mixed_seed(seed, sample) for seed in (0, 1, 2, 3, -1, 2**32, 2**63, -(2**63)) for sample in range(64)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    assert mixed_seed(5, 1) == mixed_seed(5, 1)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "tools", "add_generation_prompt"])
def test_template_settings_of_others_are_refused(name):
    with pytest.raises(RequestError, match=f"^`chat_template_kwargs`.*{name}"):
        SamplingParams(chat_template_kwargs={name: True})


def test_template_settings():
    assert SamplingParams().template_settings() == {"add_generation_prompt": True}
    params = SamplingParams(tools=({"type": "function"},), documents=[{"text": "x"}], chat_template_kwargs={"a": None})
    assert params.template_settings() == {
        "add_generation_prompt": True,
        "tools": [{"type": "function"}],
        "documents": [{"text": "x"}],
        "a": None,
    }
    assert SamplingParams(continue_final_message=True).template_settings() == {"continue_final_message": True}
    assert hash(params) == hash(copy.deepcopy(params)) and pickle.loads(pickle.dumps(params)) == params


def test_params_are_frozen_comparable_and_portable():
    bias: dict[int | str, float] = {3: 1.0}
    params = SamplingParams(logit_bias=bias, stop=["a"])
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert hash(params) == hash(copy.deepcopy(params))
    assert dataclasses.replace(params, n=2).n == 2
    with pytest.raises(ValueError, match="`n`"):
        dataclasses.replace(params, n=0)


def test_stop_ids():
    params = SamplingParams(stop_token_ids=[5, 7])
    assert params.stop_ids([2, 5]) == {2, 5, 7}
    assert dataclasses.replace(params, ignore_eos=True).stop_ids([2, 5]) == {5, 7}
    assert SamplingParams().stop_ids([]) == frozenset()


# Processors


def test_defaults_need_no_processor():
    assert SamplingParams().logits_processor(5, EOS_IDS) == []
    assert SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5).logits_processor(5, EOS_IDS) == []
    assert SamplingParams(min_new_tokens=2, ignore_eos=True).logits_processor(5, EOS_IDS) == []


def test_processors_stand_in_order():
    mask = UndecodableMask(60)
    params = SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={1: 1},
        min_new_tokens=3,
    )
    processors = params.logits_processor(7, EOS_IDS, masks=[mask])
    assert isinstance(processors, LogitsProcessorList)
    assert [type(processor) for processor in processors] == [
        TokenPenalties,
        TokenPenalties,
        LogitBias,
        UndecodableMask,
        MinNewTokensLengthLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
    ]
    assert processors[3] is mask
    repetition, others = processors[:2]
    assert (repetition.repetition_penalty, repetition.frequency_penalty, repetition.presence_penalty) == (1.5, 0, 0)
    assert (others.repetition_penalty, others.frequency_penalty, others.presence_penalty) == (1, 0.5, 0.25)
    assert (repetition.scope, others.scope, others.prompt_length) == ("all", "generated", 7)
    assert (processors[4].prompt_length_to_skip, processors[4].min_new_tokens) == (7, 3)
    assert sorted(processors[4].eos_token_id.tolist()) == sorted(EOS_IDS)


@pytest.mark.parametrize("scope", ["all", "generated"])
def test_penalties_of_one_scope_are_fused(scope):
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=1, penalty_scope=scope)
    (fused,) = params.logits_processor(7, EOS_IDS)
    assert (fused.repetition_penalty, fused.frequency_penalty, fused.presence_penalty) == (1.5, 0.5, 1.0)
    assert (fused.scope, fused.prompt_length) == (scope, 7)


@pytest.mark.parametrize(
    ("scope", "penalty", "is_penalised"),
    [
        (None, "frequency_penalty", False),
        (None, "presence_penalty", False),
        (None, "repetition_penalty", True),
        ("all", "frequency_penalty", True),
        ("all", "repetition_penalty", True),
        ("generated", "frequency_penalty", False),
        ("generated", "repetition_penalty", False),
    ],
)
def test_scope_says_whether_the_prompt_counts(scope, penalty, is_penalised):
    processors = SamplingParams(**{penalty: 2, "penalty_scope": scope}).logits_processor(1, ())
    scores = torch.full((1, 10), 4.0)
    changed = processors(torch.tensor([[7]]), scores)
    assert (changed[0, 7] < 4) == is_penalised
    changed = processors(torch.tensor([[7, 8]]), scores)
    assert changed[0, 8] == 2.0 and changed[0, 9] == 4.0


def test_bias_is_added_behind_the_penalties():
    params = SamplingParams(repetition_penalty=2, logit_bias={"3": 5}, temperature=0)
    assert params.logits_processor(1, ())(torch.tensor([[3]]), torch.zeros(1, 6))[0, 3] == 5.0
    params = SamplingParams(frequency_penalty=1, penalty_scope="all", temperature=0)
    scores = params.logits_processor(4, ())(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[3.0, -3.0]]))
    assert scores.tolist() == [[1.0, -5.0]]


def test_bias_cannot_undo_a_mask_or_the_least_length():
    params = SamplingParams(logit_bias={"9": 100, EOS: 100}, min_new_tokens=2, stop_token_ids=[5], temperature=0)
    processors = params.logits_processor(3, [EOS], masks=[UndecodableMask(8)])
    scores = processors(torch.tensor([[3, 4, 6, 7]]), torch.zeros(1, 12))
    assert [i for i in range(12) if scores[0, i] == -INF] == [EOS, 5, 8, 9, 10, 11]
    scores = processors(torch.tensor([[3, 4, 6, 7, 7]]), torch.zeros(1, 12))
    assert scores[0, EOS] == 100.0 and scores[0, 5] == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_never_becomes_nan(dtype):
    params = SamplingParams(repetition_penalty=1e6, frequency_penalty=1e30, logit_bias={1: 1e30, 2: -INF}, top_p=0.9)
    scores = torch.randn(1, 10, generator=torch.Generator().manual_seed(0)).to(dtype) * 1000
    changed = params.logits_processor(2, ())(torch.tensor([[1, 2, 3, 3]]), scores)
    assert not changed.isnan().any() and (changed > -INF).any() and (changed < INF).all()


def by_the_book(params: SamplingParams, prompt_length: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores by the published rules and transformers' own processors."""
    scores = scores.clone()
    generated = ids[:, prompt_length:]
    counted = generated if params.penalty_scope == "generated" else ids
    if params.repetition_penalty != 1 and counted.shape[1]:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(counted, scores)
    for token in (ids if params.penalty_scope == "all" else generated)[0].tolist():
        scores[0, token] -= params.frequency_penalty
    for token in set((ids if params.penalty_scope == "all" else generated)[0].tolist()):
        scores[0, token] -= params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        scores[0, int(token)] += bias
    if generated.shape[1] < params.min_new_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else EOS_IDS)]:
            scores[0, token] = -INF
    if params.temperature != 0:
        scores = scores / params.temperature
        scores = TopKLogitsWarper(params.top_k or VOCAB_SIZE)(ids, scores)
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores


def assert_same_scores(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual == -INF, expected == -INF)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_scores_follow_the_book(seed):
    params = random_params(seed)
    generator = torch.Generator().manual_seed(seed)
    for length in (5, 8, 12):
        ids = torch.randint(0, VOCAB_SIZE, (1, length), generator=generator)
        scores = 4 * torch.randn(1, VOCAB_SIZE, generator=generator)
        before = scores.clone()
        actual = params.logits_processor(5, EOS_IDS)(ids, scores)
        assert_same_scores(actual, by_the_book(params, 5, ids, before))
        assert torch.equal(scores, before)


# Plain `generate`


@pytest.mark.parametrize("seed", range(24))
def test_plain_generate_does_the_same_by_its_config(llama, seed):
    params = random_params(seed)
    prompt = torch.randint(3, VOCAB_SIZE, (1, 6), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    outputs = llama.generate(
        prompt,
        generation_config=generation_config(params, EOS_IDS, PAD),
        logits_processor=extra_processors(params, 6),
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    own = params.logits_processor(6, EOS_IDS)
    for step, (scores, logits) in enumerate(zip(outputs.scores, outputs.logits)):
        assert_same_scores(own(outputs.sequences[:, : 6 + step], logits), scores)
    text = outputs.sequences[0, 6:].tolist()
    ends = [token in params.stop_ids(EOS_IDS) for token in text]
    assert not any(ends[:-1]) and (ends[-1] or len(text) == params.max_new_tokens)
    assert len(text) >= params.min_new_tokens


def run(
    model: PreTrainedModel, draft: PreTrainedModel, params: SamplingParams, seed: int
) -> tuple[list[Request], DecodingStats]:
    draw = random.Random(seed)
    prompts = [draw.choices(range(3, VOCAB_SIZE), k=length) for length in (1, 7, 4)]
    requests = [
        Request(
            prompt,
            params.max_new_tokens,
            DecodingRules(
                params.logits_processor(len(prompt), EOS_IDS),
                eos_token_ids=params.stop_ids(EOS_IDS),
                do_sample=not params.is_greedy,
            ),
            seed=number,
            keep_scores=True,
            keep_logits=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    decoder = Decoder(model, CausalLMDrafter(draft, 4), max_batch_size=2)
    for _ in decoder.run(requests):
        pass
    return requests, decoder.stats


@pytest.mark.slow
def test_greedy_speculation_equals_plain_generate(llama):
    draft, total = noisy_copy(llama, 0.8), DecodingStats()
    for seed in range(8):
        params = random_params(seed, temperature=0)
        requests, stats = run(llama, draft, params, seed)
        total += stats
        for request in requests:
            expected = llama.generate(
                torch.tensor([request.prompt_ids]),
                generation_config=generation_config(params, EOS_IDS, PAD),
                logits_processor=extra_processors(params, len(request.prompt_ids)),
            )
            assert (seed, request.token_ids) == (seed, expected[0, len(request.prompt_ids) :].tolist())
    assert_partly_accepted(total)


@pytest.mark.slow
def test_speculative_samples_are_drawn_from_the_scores_by_the_book(llama):
    draft, total = noisy_copy(llama, 0.8), DecodingStats()
    for seed in range(8):
        params = random_params(seed, temperature=0.8)
        requests, stats = run(llama, draft, params, seed)
        total += stats
        for request in requests:
            length = len(request.prompt_ids)
            ids = torch.tensor([request.prompt_ids + request.token_ids])
            for step, (scores, logits) in enumerate(zip(request.scores, request.logits, strict=True)):
                expected = by_the_book(params, length, ids[:, : length + step], logits[None])[0]
                assert_same_scores(scores, expected)
                assert scores[request.token_ids[step]] > -INF
    assert_partly_accepted(total)


def test_penalty_of_what_was_generated_lets_a_model_repeat_its_prompt():
    model = cycle_model([1, 2, 3, 0], runner_up=0.8)
    text = {}
    for scope in ("all", "generated"):
        params = SamplingParams(temperature=0, frequency_penalty=4, penalty_scope=scope, max_new_tokens=3)
        config, processors = generation_config(params, (), 0), extra_processors(params, 4)
        output = model.generate(torch.tensor([[1, 2, 3, 0]]), generation_config=config, logits_processor=processors)
        text[scope] = output[0, 4:].tolist()
    assert text["generated"] == [1, 2, 3]
    params = SamplingParams(temperature=0, frequency_penalty=4, logit_bias={1: -10}, max_new_tokens=1)
    output = model.generate(
        torch.tensor([[1, 2, 3, 0]]),
        generation_config=generation_config(params, (), 0),
        logits_processor=extra_processors(params, 4),
    )
    assert output[0, 4] != 1
