"""Every kind of backend gives each prompt the text that plain `generate` gives it alone."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_specgen.serving.backends import get_generation_backend
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.chi_square import FALSE_ALARM, chi_square_p_value
from tests.support.models import EOS, PAD, VOCAB_SIZE, make_model, noisy_copy
from tests.support.serving import (
    KINDS,
    assert_answers,
    assert_speculates,
    backend_of,
    greedy,
    mask,
    mixed_params,
    plain_ids,
    plain_text,
    random_prompts,
    target_of,
)
from tests.support.tokenizers import NUM_TOKENS, TOKENIZER, ids_of

FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "opt"]


# Greedy: the text of plain `generate`


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, kind) for family in FAMILIES for kind in ("eager", "speculative", "dspark")),
        *((family, kind) for family in ("llama", "mistral") for kind in ("batched", "lookup")),
    ],
)
def test_greedy_text_is_that_of_plain_generate(family, kind):
    if family == "opt" and kind == "dspark":
        family = "qwen2"
    backend = backend_of(kind, family)
    prompts = random_prompts(10, seed=3)
    params = [greedy(5 + 3 * i) for i in range(10)]
    completions = backend.generate(prompts, params)
    assert_answers(completions, prompts, params, family)
    assert all(PAD not in c.token_ids and max(c.token_ids) < NUM_TOKENS for c in completions)
    if family in ("gpt2", "opt") and kind == "dspark":
        assert backend.stats.drafting_rounds > 0  # whether it is ever right is not the question here
    else:
        assert_speculates(kind, backend)


def test_undecodable_ids_would_be_chosen_without_the_mask():
    prompts, params = random_prompts(12, seed=3), greedy(24, ignore_eos=True)
    masked = backend_of("lookup").generate(prompts, params)
    bare = backend_of("lookup", mask_undecodable=False).generate(prompts, params)
    assert max(i for c in masked for i in c.token_ids) < NUM_TOKENS
    assert any(i >= NUM_TOKENS for c in bare for i in c.token_ids)


OPTIONS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "frequency penalty": {"frequency_penalty": 1.5},
    "presence penalty": {"presence_penalty": 3.0},
    "penalties that count all": {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "penalty_scope": "all"},
    "penalties on what is generated": {"repetition_penalty": 1.6, "penalty_scope": "generated"},
    "bias": {"logit_bias": {10: 6.0, "11": -100.0, EOS: 2.0}},
    "ban": {"logit_bias": {i: -float("inf") for i in range(3, 50, 2)}},
    "stops": {"stop": ["e", "qu", "B"]},
    "long stops": {"stop": ["abcdefgh", "never"]},
    "min_new_tokens": {"min_new_tokens": 15, "logit_bias": {EOS: 9.0}},
    "min_new_tokens and stop ids": {"min_new_tokens": 9, "stop_token_ids": [5, 9, 30, 31, 32], "logit_bias": {9: 5.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS: 9.0}},
    "stop ids": {"stop_token_ids": list(range(20, 30))},
    "everything": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {8: 2.0},
        "stop": ["ab", "z"],
        "stop_token_ids": [40],
        "min_new_tokens": 4,
    },
}

SPECULATING = {"bias", "min_new_tokens", "long stops", "ban"}  # penalties leave little to look up


@pytest.mark.parametrize("kind", ["eager", "speculative"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_give_the_text_of_plain_generate(option, kind):
    backend = backend_of(kind)
    prompts, params = random_prompts(4, seed=5), greedy(20, **OPTIONS[option])
    completions = backend.generate(prompts, params)
    assert_answers(completions, prompts, [params] * 4)
    if option not in ("long stops", "stops", "stop ids", "everything"):  # these may end a row at once
        bare = [plain_text(prompt, greedy(20))[1] for prompt in prompts]
        assert [list(c.token_ids) for c in completions] != bare, "the option changes nothing here"
    if kind == "eager":
        assert_speculates(kind, backend)
    elif option in SPECULATING:
        assert sum(backend.stats.accepted.values()) > 0


def test_stop_string_of_a_config_ends_where_the_text_does():
    """Where no stop string begins in the prompt, plain `generate` with `stop_strings` ends at the same token."""
    params = greedy(30, stop=["e", "t", "R"])
    prompts = [p for p in random_prompts(20, seed=6) if not set(p) & set("etR")]
    completions = backend_of("lookup").generate(prompts, params)
    assert {c.finish_reason for c in completions} >= {"stop"}
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == plain_ids(prompt, params)


def test_finish_reasons():
    text, ids = plain_text("abc", greedy(20, ignore_eos=True))
    params = [
        greedy(7, ignore_eos=True),
        greedy(20, ignore_eos=True, stop=text[4:6]),
        greedy(20, ignore_eos=True, stop_token_ids=[ids[2]]),
        greedy(20, logit_bias={EOS: 1000.0}),
    ]
    found = backend_of("batched").generate(["abc"] * 4, params)
    assert [c.finish_reason for c in found] == ["length", "stop", "eos", "eos"]
    assert list(found[0].token_ids) == ids[:7]
    assert found[1].text == text[: text.index(text[4:6])]
    assert list(found[2].token_ids) == ids[: ids.index(ids[2]) + 1]
    assert found[3].token_ids == (EOS,) and found[3].text == ""


# Requests of their own


def answers(completions):
    return [(c.text, c.token_ids, c.finish_reason) for c in completions]


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_in_company_equals_itself_alone(kind):
    prompts, params = random_prompts(16, seed=8), mixed_params()
    backend = backend_of(kind, prefill_chunk_size=4) if kind != "eager" else backend_of(kind)
    together = backend.generate(prompts, params)
    alone = [backend_of(kind).generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    assert answers(together) == answers(alone)
    assert {c.finish_reason for c in together} >= {"length", "stop"}
    assert_speculates(kind, backend)


@pytest.mark.slow
def test_seed_gives_the_same_text_in_kinds_without_a_drafter():
    prompts, params = random_prompts(16, seed=9), mixed_params(1)
    eager, batched = (backend_of(kind).generate(prompts, params) for kind in ("eager", "batched"))
    assert answers(eager) == answers(batched)
    others = [dataclasses.replace(own, seed=own.seed + 1000) for own in params]
    assert answers(eager) != answers(backend_of("eager").generate(prompts, others))


@pytest.mark.parametrize("kind", KINDS)
def test_results_come_in_the_order_of_more_prompts_than_slots(kind):
    """The longest go first, whatever their place."""
    prompts = random_prompts(14, seed=10)
    params = [greedy(1 + 5 * i % 17) for i in range(14)]
    settings = {} if kind == "eager" else {"max_batch_size": 3}
    assert_answers(backend_of(kind, **settings).generate(prompts, params), prompts, params)


def test_global_seed_and_callers_are_left_as_they_are():
    prompts, params = random_prompts(4), [greedy(4), SamplingParams(max_new_tokens=5, seed=1)] * 2
    backends = [backend_of(kind) for kind in KINDS]  # making the models sets the global seed
    config, generation_config = repr(target_of().config), repr(target_of().generation_config)
    tokenizer, state, before = repr(TOKENIZER), torch.get_rng_state(), copy.deepcopy((prompts, params))
    for backend in backends:
        backend.generate(prompts, params)
    assert (prompts, params) == before and torch.equal(torch.get_rng_state(), state)
    assert repr(TOKENIZER) == tokenizer
    assert (repr(target_of().config), repr(target_of().generation_config)) == (config, generation_config)


# Sampling


TINY = 6


@functools.cache
def tiny_models():
    model = make_model(
        vocab_size=TINY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, gain=9.0
    )
    model.generation_config.eos_token_id = None
    return model, noisy_copy(model, scale=1.2)


def tiny_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("uvwxyz")}, unk_token="u"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tiny_law(params, prompt_ids, length):
    """The probabilities of all continuations, in the order of `itertools.product`, by hand."""
    law = torch.ones(1, dtype=torch.double)
    for count in range(length):
        tails = torch.tensor(list(itertools.product(range(TINY), repeat=count)), dtype=torch.long)
        ids = torch.cat([torch.tensor(prompt_ids).expand(len(tails), -1), tails], dim=1)
        with torch.no_grad():
            scores = tiny_models()[0](ids).logits[:, -1].double()
        for token in range(TINY):
            scores[:, token] -= params.frequency_penalty * (tails == token).sum(dim=1)
        scores = scores / params.temperature
        law = (law[:, None] * scores.softmax(dim=-1)).flatten()
    return law


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batched", "lookup", "speculative"])
def test_samples_have_the_law_of_the_model(kind):
    """All continuations of 3 tokens, 2,500 draws; a false alarm once in 10,000 runs."""
    target, draft = tiny_models()
    params = SamplingParams(max_new_tokens=3, temperature=1.3, frequency_penalty=0.6, n=2500, seed=11)
    prompt_ids = [3, 1, 4, 0, 2, 5, 3, 1]
    settings = {"max_batch_size": 500}
    if kind == "speculative":
        settings |= {"draft_model": draft, "num_assistant_tokens": 2}
    backend = get_generation_backend(kind.replace("lookup", "speculative"), target, tiny_tokenizer(), **settings)
    ids = torch.tensor([c.token_ids for c in backend.generate([prompt_ids], params)])
    counts = (ids * torch.tensor([36, 6, 1])).sum(dim=1).bincount(minlength=216)
    assert chi_square_p_value(counts, tiny_law(params, prompt_ids, 3)) > FALSE_ALARM
    wrong = dataclasses.replace(params, frequency_penalty=0.0), dataclasses.replace(params, temperature=1.0)
    for other in wrong:  # negative controls
        assert chi_square_p_value(counts, tiny_law(other, prompt_ids, 3)) < FALSE_ALARM
    assert_speculates(kind, backend)


@pytest.mark.parametrize("kind", KINDS)
def test_first_samples_of_a_prompt_are_those_of_fewer_samples(kind):
    params = SamplingParams(max_new_tokens=16, seed=5, n=4)
    prompts = random_prompts(3, seed=12)
    found = backend_of(kind).generate(prompts, params)
    assert [(c.index, c.sample) for c in found] == [(i, s) for i in range(3) for s in range(4)]
    for count in (1, 3):
        fewer = backend_of(kind).generate(prompts, dataclasses.replace(params, n=count))
        assert answers(fewer) == answers([c for c in found if c.sample < count])
    assert len({c.text for c in found}) > 8


def test_neighbouring_seeds_have_no_sample_in_common():
    backend, prompt = backend_of("batched"), random_prompts(1, seed=12)
    params = [SamplingParams(max_new_tokens=16, temperature=1.5, seed=seed, n=4) for seed in range(4)]
    assert len({c.text for own in params for c in backend.generate(prompt, own)}) == 16


def test_requests_without_a_seed_differ():
    found = backend_of("batched").generate(["abc"] * 8, SamplingParams(max_new_tokens=16, temperature=1.5))
    assert len({c.text for c in found}) > 5


@pytest.mark.parametrize(
    "budget",
    [1, 2, 9],
)
def test_samples_share_the_prefill_of_their_prompt(budget):
    backend = backend_of("batched")
    num_fed = 0

    def count(module, args, kwargs):
        nonlocal num_fed
        num_fed += kwargs["input_ids"].numel() * (kwargs["position_ids"].min() < 41)

    hook = target_of().register_forward_pre_hook(count, with_kwargs=True)
    try:
        backend.generate(["a" * 40], SamplingParams(max_new_tokens=budget, n=6, ignore_eos=True))
    finally:
        hook.remove()
    assert num_fed == 41 + 5


# Log-probabilities


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_plain_forward_pass(kind):
    prompts = random_prompts(6, seed=13)
    params = [
        greedy(14, logprobs=3),
        SamplingParams(max_new_tokens=14, seed=1, logprobs=2, frequency_penalty=1.0, temperature=0.7),
        greedy(14, logprobs=0, stop=["e", "o"]),
        greedy(14),
        SamplingParams(max_new_tokens=9, seed=2, logprobs=VOCAB_SIZE, logit_bias={10: 5}),
        greedy(14, logprobs=1, stop_token_ids=list(range(20, 40))),
    ]
    backend = backend_of(kind)
    completions = backend.generate(prompts, params)
    for prompt, own, completion in zip(prompts, params, completions, strict=True):
        if own.logprobs is None:
            assert completion.logprobs is None
            continue
        prompt_ids = ids_of(prompt)
        with torch.no_grad():
            logits = target_of()(torch.tensor([prompt_ids + list(completion.token_ids)])).logits[0]
        expected = logits[len(prompt_ids) - 1 : -1].log_softmax(dim=-1)
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
        for position, entry in enumerate(completion.logprobs):
            assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
            assert len(entry.top) == own.logprobs
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            torch.testing.assert_close(
                torch.tensor(values),
                expected[position].sort(descending=True).values[: own.logprobs],
                atol=1e-4,
                rtol=0,
            )
            for token_id, value in entry.top:
                assert value == pytest.approx(float(expected[position, token_id]), abs=1e-4)
    assert_speculates(kind, backend)


@pytest.mark.parametrize("kind", ["batched", "speculative"])
def test_processed_logprobs_are_of_the_distribution_that_is_drawn_from(kind):
    own = SamplingParams(
        max_new_tokens=14,
        seed=1,
        logprobs=9,
        logprobs_mode="processed",
        temperature=0.7,
        top_k=6,
        frequency_penalty=1.0,
        logit_bias={10: 2.0},
        min_new_tokens=5,
    )
    for params in (own, dataclasses.replace(own, temperature=0.0)):
        prompts, distances = random_prompts(4, seed=13), []
        completions = backend_of(kind).generate(prompts, params)
        raw = backend_of(kind).generate(prompts, dataclasses.replace(params, logprobs_mode="raw"))
        for prompt, completion, other in zip(prompts, completions, raw, strict=True):
            assert completion.token_ids == other.token_ids
            prompt_ids = ids_of(prompt)
            ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
            processors = params.logits_processor(len(prompt_ids), [EOS], [mask()])
            with torch.no_grad():
                logits = target_of()(ids).logits[0]
            for position, entry in enumerate(completion.logprobs, start=len(prompt_ids)):
                expected = processors(ids[:, :position], logits[None, position - 1]).log_softmax(dim=-1)[0]
                assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
                assert len(entry.top) == min(9, int((expected > -torch.inf).sum()))
                for token_id, value in entry.top:
                    assert value == pytest.approx(float(expected[token_id]), abs=1e-4)
            distances += [abs(a.logprob - b.logprob) for a, b in zip(completion.logprobs, other.logprobs)]
        assert max(distances) > 0.1, "the two modes say the same here"


@pytest.mark.parametrize("kind", ["batched", "speculative"])
def test_more_logprobs_than_the_vocabulary_has_are_refused_for_their_request(kind):
    prompts, params = random_prompts(3), [greedy(5), greedy(5, logprobs=VOCAB_SIZE + 1), greedy(5)]
    completions = backend_of(kind).generate(prompts, params)
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert isinstance(completions[1].error, ValueError)
    assert str(VOCAB_SIZE + 1) in str(completions[1].error) and "`logprobs`" in str(completions[1].error)
