"""Every kind of backend gives each prompt the text that plain `generate` gives it alone; faults stay with theirs."""

import copy
import dataclasses
import functools
import itertools
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from hf_specgen import DecodingStats, PromptLookupDrafter, UndecodableMask
from hf_specgen.serving.backends import (
    BACKENDS,
    BatchedGenerationBackend,
    DSparkGenerationBackend,
    EagerGenerationBackend,
    SpeculativeDecodingGenerationBackend,
    get_generation_backend,
)
from hf_specgen.serving.openai_request import from_openai
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.chi_square import FALSE_ALARM, chi_square_p_value
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import BOS, EOS, PAD, VOCAB_SIZE, assert_partly_accepted, make_model, noisy_copy

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.!?"  # ids 3 to 59; four ids have no token
NUM_TOKENS = 3 + len(LETTERS)
KINDS = ["eager", "batched", "lookup", "speculative", "dspark"]
FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "opt"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'][0] }} {{ message['content'] }}.{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)


def letters_tokenizer(adds_bos=True):
    """One token per letter, and a beginning of sequence before every text."""
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **{letter: i for i, letter in enumerate(LETTERS, start=3)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="?"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


TOKENIZER = letters_tokenizer()


def target_of(family="llama"):
    """Its text is varied, ends at times, and a DSpark drafter can learn some of it."""
    return _target_of(family)


@functools.cache
def _target_of(family):
    return make_model(family) if family in ("gpt2", "opt") else bigram_target(family)


@functools.cache
def drafter_of(family, kind):
    return noisy_copy(target_of(family)) if kind == "speculative" else fitted_drafter(target_of(family))


def backend_of(kind, family="llama", **settings):
    name = "speculative" if kind == "lookup" else kind
    if kind in ("speculative", "dspark"):
        settings = {"draft_model": drafter_of(family, kind), "num_assistant_tokens": 3, **settings}
    return get_generation_backend(name, target_of(family), TOKENIZER, **settings)


def assert_speculates(kind, *backends):
    stats = [backend.stats for backend in backends]
    if kind in ("eager", "batched"):
        assert all(one.drafting_rounds == 0 and one.tokens > 0 for one in stats)
    else:
        assert_partly_accepted(*stats)


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


def mask():
    return UndecodableMask(NUM_TOKENS, PAD, EOS)


def plain_ids(text, params, family="llama"):
    """What plain `generate` makes of one prompt, alone and without padding."""
    return list(_plain_ids(tuple(ids_of(text) if isinstance(text, str) else text), params, family))


@functools.cache
def _plain_ids(ids, params, family):
    model, prompt_ids = target_of(family), torch.tensor([ids])
    config = params.to_generation_config([EOS], pad_token_id=PAD)
    if config.eos_token_id == []:
        config.eos_token_id = -1
    extra = LogitsProcessorList([*params.extra_processors(prompt_ids.shape[1]), mask()])
    generated = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        generation_config=config,
        logits_processor=extra,
        tokenizer=TOKENIZER if params.stop else None,
    )
    return tuple(generated[0, len(ids) :].tolist())


def plain_text(text, params, family="llama"):
    """And its text: stop strings count in what is generated only, so they are looked for by hand."""
    ids = plain_ids(text, dataclasses.replace(params, stop=()), family)
    whole = [TOKENIZER.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
    for count, now in enumerate(whole):
        if found := [now.find(stop) for stop in params.stop if stop in now]:
            return now[: min(found)], ids[:count]
    return whole[-1], ids


def random_prompts(count, seed=0, longest=14):
    generator = random.Random(seed)
    return ["".join(generator.choices(LETTERS, k=generator.randint(1, longest))) for _ in range(count)]


def greedy(max_new_tokens=24, **settings):
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, **settings)


def assert_answers(completions, prompts, params, family="llama"):
    for number, (completion, prompt, own) in enumerate(zip(completions, prompts, params, strict=True)):
        text, ids = plain_text(prompt, own, family)
        assert (number, completion.text, list(completion.token_ids)) == (number, text, ids)
        assert (completion.index, completion.sample, completion.error) == (number, 0, None)
        assert completion.prompt == prompt


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


def mixed_params(seed=0, count=16):
    """Budgets, penalties, stops, seeds: no two alike."""
    generator = random.Random(seed)
    made = []
    for number in range(count):
        settings = {
            "max_new_tokens": generator.randint(1, 24),
            "temperature": generator.choice([0.0, 0.8, 1.5]),
            "top_k": generator.choice([0, 5, 20]),
            "top_p": generator.choice([1.0, 0.9]),
            "min_p": generator.choice([0.0, 0.05]),
            "repetition_penalty": generator.choice([1.0, 1.3]),
            "frequency_penalty": generator.choice([0.0, 0.7]),
            "presence_penalty": generator.choice([0.0, -0.4]),
            "logit_bias": generator.choice([None, {7: 2.0}, {"9": -5}]),
            "stop": generator.choice([(), ("e",), ("qu", "x", "AB")]),
            "stop_token_ids": generator.choice([(), (33, 34)]),
            "ignore_eos": generator.choice([False, True]),
            "seed": number,
        }
        made.append(SamplingParams(**settings))
    return made


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


def test_seed_gives_the_same_text_in_kinds_without_a_drafter():
    prompts, params = random_prompts(16, seed=9), mixed_params(1)
    eager, batched = (backend_of(kind).generate(prompts, params) for kind in ("eager", "batched"))
    assert answers(eager) == answers(batched)
    others = [dataclasses.replace(own, seed=own.seed + 1000) for own in params]
    assert answers(eager) != answers(backend_of("eager").generate(prompts, others))


@pytest.mark.parametrize("kind", KINDS)
def test_results_come_in_the_order_of_more_prompts_than_seats(kind):
    """The longest go first, whatever their place."""
    prompts = random_prompts(14, seed=10)
    params = [greedy(1 + 5 * i % 17) for i in range(14)]
    settings = {} if kind == "eager" else {"max_batch_size": 3}
    assert_answers(backend_of(kind, **settings).generate(prompts, params), prompts, params)


def test_global_seed_and_callers_are_left_as_they_are():
    prompts, params = random_prompts(4), [greedy(4), SamplingParams(max_new_tokens=5, seed=1)] * 2
    config, generation_config = repr(target_of().config), repr(target_of().generation_config)
    tokenizer, state, before = repr(TOKENIZER), torch.get_rng_state(), copy.deepcopy((prompts, params))
    for kind in KINDS:
        backend_of(kind).generate(prompts, params)
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
def test_samples_of_a_prompt_are_those_of_the_seeds_after_its_own(kind):
    params = SamplingParams(max_new_tokens=16, seed=5, n=4)
    prompts = random_prompts(3, seed=12)
    found = backend_of(kind).generate(prompts, params)
    assert [(c.index, c.sample) for c in found] == [(i, s) for i in range(3) for s in range(4)]
    for completion in found:
        own = dataclasses.replace(params, n=1, seed=5 + completion.sample)
        (alone,) = backend_of(kind).generate([prompts[completion.index]], own)
        assert (completion.text, completion.token_ids) == (alone.text, alone.token_ids)
    assert len({c.text for c in found}) > 8


def test_seeds_go_round_at_the_end():
    backend = backend_of("batched")
    last = SamplingParams(max_new_tokens=16, seed=2**32 - 1, n=2)
    found = backend.generate(["abc"], last)
    assert found[1].text == backend.generate(["abc"], SamplingParams(max_new_tokens=16, seed=0))[0].text


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
def test_more_logprobs_than_the_vocabulary_has_are_refused_for_their_request(kind):
    prompts, params = random_prompts(3), [greedy(5), greedy(5, logprobs=VOCAB_SIZE + 1), greedy(5)]
    completions = backend_of(kind).generate(prompts, params)
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert isinstance(completions[1].error, ValueError)
    assert str(VOCAB_SIZE + 1) in str(completions[1].error) and "`logprobs`" in str(completions[1].error)


# Prompts


def test_prompt_may_be_a_text_ids_or_messages():
    backend = backend_of("batched")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    as_text = "<bos>u hi.a ok.a "
    params = greedy(12)
    of_text, of_ids, of_messages = backend.generate(["hi there", ids_of("hi there"), messages], params)
    assert of_text.text == of_ids.text == plain_text("hi there", params)[0]
    assert of_ids.prompt == "<bos>hi there" and of_text.prompt == "hi there"
    assert of_messages.prompt == as_text
    chat_ids = letters_tokenizer(adds_bos=False)(as_text)["input_ids"]
    assert chat_ids.count(BOS) == 1 and chat_ids[0] == BOS
    assert list(of_messages.token_ids) == plain_ids(chat_ids, params)
    doubled = plain_ids([BOS, *chat_ids], params)
    assert list(of_messages.token_ids) != doubled, "it would not be seen here"
    assert tuple(of_messages.token_ids) == backend.generate([tuple(chat_ids)], params)[0].token_ids


def refused(prompt, params=None, kind="batched", **settings):
    """The error of one request between two others, which are served."""
    backend = backend_of(kind, **settings)
    params = greedy(5) if params is None else params
    first, middle, last = backend.generate(["abc", prompt, "xyz"], [greedy(5), params, greedy(6)])
    assert_answers([first], ["abc"], [greedy(5)])
    assert last.text == plain_text("xyz", greedy(6))[0] and last.index == 2
    assert (middle.text, middle.token_ids, middle.finish_reason, middle.index) == ("", (), "error", 1)
    with pytest.raises(type(middle.error)) as raised:
        backend.stream(prompt, params)
    assert str(raised.value) == str(middle.error)
    assert (backend._jobs, backend._named, backend._decoder.has_unfinished) == ({}, {}, False)
    return middle.error


BAD_PROMPTS = {
    "empty ids": ([], ValueError, "empty"),
    "none": (None, TypeError, ""),
    "a number": (5, TypeError, ""),
    "negative id": ([5, -100], ValueError, "-100"),
    "id over the vocabulary": ([5, VOCAB_SIZE], ValueError, str(VOCAB_SIZE)),
    "enormous id": ([5, 10**15], ValueError, str(10**15)),
    "float id": ([5.0], ValueError, "5.0"),
    "bool id": ([True], ValueError, "True"),
    "nested": ([[5]], ValueError, "5"),
    "tensor of rows": (torch.tensor([[5]]), ValueError, ""),
    "one message without its list": ({"role": "user", "content": "hi"}, ValueError, "role"),
    "messages and text": ([{"role": "user", "content": "hi"}, "hi"], ValueError, "hi"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompt_that_is_none_is_refused_for_itself_alone(case):
    prompt, kind, words = BAD_PROMPTS[case]
    error = refused(prompt)
    assert type(error) is kind and words in str(error)


@pytest.mark.parametrize("prompt", [[{"role": "tool", "content": "hi"}], [{"content": "hi"}]])
def test_messages_that_the_template_refuses_are_refused_for_themselves_alone(prompt):
    error = refused(prompt)
    assert type(error) is ValueError
    assert ("no tools here" if "role" in prompt[0] else "no attribute 'role'") in str(error)


def test_messages_without_a_template_are_refused_for_themselves_alone():
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = None
    backend = get_generation_backend("batched", target_of(), tokenizer)
    good, bad = backend.generate(["abc", [{"role": "user", "content": "hi"}]], greedy(5))
    assert good.text == plain_text("abc", greedy(5))[0]
    assert isinstance(bad.error, ValueError) and "chat_template" in str(bad.error)


def test_empty_text_is_refused_where_it_has_no_token():
    backend = get_generation_backend("batched", target_of(), letters_tokenizer(adds_bos=False))
    good, bad = backend.generate(["abc", ""], greedy(5))
    assert good.finish_reason == "length" and isinstance(bad.error, ValueError) and "empty" in str(bad.error)
    assert backend_of("batched").generate([""], greedy(5))[0].text == plain_text([BOS], greedy(5))[0]


@pytest.mark.parametrize("params", [None, {"temperature": 0}, "greedy", [greedy(5)]])
def test_params_of_a_wrong_type_are_refused_for_themselves_alone(params):
    backend = backend_of("batched")
    good, bad = backend.generate(["abc", "xyz"], [greedy(5), params])
    assert good.text == plain_text("abc", greedy(5))[0]
    assert isinstance(bad.error, TypeError) and "`params`" in str(bad.error) and bad.finish_reason == "error"
    with pytest.raises(TypeError, match="`params`"):
        backend.stream("abc", params)


def test_stop_ids_outside_the_vocabulary_are_refused_for_their_request():
    assert str(VOCAB_SIZE) in str(refused("abc", greedy(5, stop_token_ids=[VOCAB_SIZE])))


@pytest.mark.parametrize("prompts", ["abc", {"a": "b"}, None, 5, iter(["abc"])])
def test_prompts_that_are_no_list_are_refused(prompts):
    backend = backend_of("batched")
    for call in (backend.generate, backend.stream_batch):
        with pytest.raises(TypeError, match="`prompts` has to be a list"):
            call(prompts, greedy(5))


def test_params_have_to_be_as_many_as_prompts():
    backend = backend_of("batched")
    for call in (backend.generate, backend.stream_batch):
        with pytest.raises(ValueError, match="one entry per prompt, 2, but holds 1"):
            call(["abc", "xyz"], [greedy(5)])
    assert backend.generate([], greedy(5)) == backend.generate([], []) == []


# The window


def test_prompt_over_the_window_is_refused_with_both_numbers():
    limit = target_of().config.max_position_embeddings
    error = refused("a" * 240, greedy(16))
    assert "241 tokens" in str(error) and "`max_new_tokens` of 16" in str(error) and str(limit) in str(error)
    fits = backend_of("batched").generate(["a" * 239], greedy(16))[0]
    assert fits.text == plain_text("a" * 239, greedy(16))[0]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_window_of_learned_positions(family):
    backend = backend_of("batched", family)
    refused_one, fits = backend.generate(["a" * 240, "a" * 239], greedy(16))
    assert "241 tokens" in str(refused_one.error)
    assert fits.text == plain_text("a" * 239, greedy(16), family)[0]


def test_truncation_keeps_the_end_of_a_prompt():
    backend = backend_of("batched", truncate_prompt="left")
    text = random_prompts(1, seed=4, longest=1)[0] * 200 + "".join(LETTERS) * 3
    (completion,) = backend.generate([text], greedy(16))
    kept = ids_of(text)[-240:]
    assert list(completion.token_ids) == plain_ids(kept, greedy(16))
    assert completion.prompt == TOKENIZER.decode(kept)
    assert completion.error is None
    (short,) = backend.generate(["abc"], greedy(16))
    assert list(short.token_ids) == plain_ids("abc", greedy(16)) and short.prompt == "abc"
    (no_room,) = backend.generate(["abc"], greedy(256))
    assert "4 tokens" in str(no_room.error) and "256" in str(no_room.error)


@pytest.mark.parametrize("value", ["right", True, 5, ""])
def test_other_ends_to_truncate_are_refused(value):
    with pytest.raises(ValueError, match='`truncate_prompt` has to be None or "left"'):
        backend_of("batched", truncate_prompt=value)


# Settings


def test_backends_by_name():
    assert BACKENDS == {
        "eager": EagerGenerationBackend,
        "batched": BatchedGenerationBackend,
        "speculative": SpeculativeDecodingGenerationBackend,
        "dspark": DSparkGenerationBackend,
    }
    for kind in KINDS:
        assert type(backend_of(kind)) is BACKENDS[kind.replace("lookup", "speculative")]


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


def test_max_tokens_in_cache_of_a_backend():
    backend = backend_of("batched", max_tokens_in_cache=2 * 100)
    prompts, params = random_prompts(9, seed=14), greedy(12)
    assert_answers(backend.generate(prompts, params), prompts, [params] * 9)
    good, bad = backend.generate(["abc", "a" * 200], greedy(12))
    assert good.error is None and "`max_tokens_in_cache` is 200" in str(bad.error)


# Failures


class Fault(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_failure_of_one_requests_processor_is_attached_to_it(monkeypatch, kind):
    """The bias of one request breaks after some tokens."""
    backend = backend_of(kind)
    prompts, params = random_prompts(5, seed=15), [greedy(12) for _ in range(5)]
    params[2] = greedy(12, logit_bias={10: 1.0}, ignore_eos=True)
    make = SamplingParams.logits_processor

    def breaks(input_ids, scores):
        if input_ids.shape[1] >= len(ids_of(prompts[2])) + 4:
            raise Fault("no luck")
        return scores

    def with_fault(self, *args):
        made = make(self, *args)
        return LogitsProcessorList([*made, breaks]) if self.logit_bias else made

    monkeypatch.setattr(SamplingParams, "logits_processor", with_fault)
    found = backend.generate(prompts, params)
    assert isinstance(found[2].error, Fault) and found[2].finish_reason == "error"
    assert list(found[2].token_ids) == plain_ids(prompts[2], params[2])[:4]
    assert found[2].text == TOKENIZER.decode(found[2].token_ids)
    others = [0, 1, 3, 4]
    for number in others:
        assert found[number].text == plain_text(prompts[number], params[number])[0]
    stream = backend.stream(prompts[2], params[2])
    with pytest.raises(Fault, match="no luck"):
        list(stream)
    assert stream.completion.finish_reason == "error"


def test_bans_of_everything_are_an_error_of_their_request():
    everything = greedy(5, logit_bias={i: -float("inf") for i in range(VOCAB_SIZE)})
    good, bad = backend_of("batched").generate(["abc", "xyz"], [greedy(5), everything])
    assert good.text == plain_text("abc", greedy(5))[0]
    assert isinstance(bad.error, ValueError) and bad.finish_reason == "error" and bad.text == ""


def raise_at(function, number):
    """`function`, but its call of that number raises."""
    calls = itertools.count(1)

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise Fault("broken")
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_model_that_raises_reaches_the_caller_and_the_backend_goes_on(monkeypatch, kind, number):
    backend = backend_of(kind)
    prompts, params = random_prompts(5, seed=16), greedy(12)
    with monkeypatch.context() as patch:
        patch.setattr(target_of(), "forward", raise_at(target_of().forward, number))
        with pytest.raises(Fault, match="broken"):
            backend.generate(prompts, params)
    assert (backend._jobs, backend._named, backend._decoder.has_unfinished) == ({}, {}, False)
    assert backend._decoder.rows.cache.num_allocated_rows == 0
    assert_answers(backend.generate(prompts, params), prompts, [params] * 5)


@pytest.mark.parametrize("kind", ["speculative", "dspark"])
def test_draft_model_that_raises_reaches_the_caller_and_the_backend_goes_on(monkeypatch, kind):
    backend = backend_of(kind)
    prompts, params, draft = random_prompts(5, seed=16), greedy(12), drafter_of("llama", kind)
    with monkeypatch.context() as patch:
        patch.setattr(draft, "forward", raise_at(draft.forward, 3))
        with pytest.raises(Fault, match="broken"):
            backend.generate(prompts, params)
    assert_answers(backend.generate(prompts, params), prompts, [params] * 5)


# What a completion tells


def test_peers_keep_a_backend_without_work_passing():
    backend, asked, passes = backend_of("batched"), [], []
    prompts, params = random_prompts(3, seed=18), greedy(6)

    def has_unfinished_peers(is_busy):
        asked.append(is_busy)
        return len(asked) <= 15

    hook = target_of().register_forward_pre_hook(lambda *args: passes.append(1))
    try:
        found = backend.generate(prompts, params, has_unfinished_peers)
    finally:
        hook.remove()
    assert_answers(found, prompts, [params] * 3)
    assert len(asked) == 16 and len(passes) == 15 and False in asked and asked == sorted(asked, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_completions_add_up_to_those_of_the_backend(kind):
    backend = backend_of(kind)
    found = backend.generate(random_prompts(6, seed=17), mixed_params(3, 6))
    total = sum((c.stats for c in found), DecodingStats())
    assert total.tokens == backend.stats.tokens == sum(len(c.token_ids) for c in found)
    assert total.rounds == backend.stats.rounds and total.accepted == backend.stats.accepted
    if kind in ("speculative", "dspark", "lookup"):
        assert sum(total.proposed.values()) > 0


def test_handler_of_an_openai_like_server():
    backend = backend_of("speculative")
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 15,
        "temperature": 0,
        "stop": ["e"],
        "logit_bias": {"10": 2},
        "stream": True,
    }
    params = from_openai(body)
    stream = backend.stream(body["messages"], params)
    text = "".join(stream)
    chat_ids = letters_tokenizer(adds_bos=False)("<bos>u hi.a ")["input_ids"]
    assert text == stream.completion.text == plain_text(chat_ids, params)[0]
