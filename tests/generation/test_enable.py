"""`model.generate` with a drafter against the plain one: families, stops and options, and the enabled model."""

import copy
import pickle
import string
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specgen import (
    DecodingStats,
    TokenPenalties,
    UndecodableMask,
    disable_speculation,
    enable_speculation,
)
from tests.support.generate_calls import (
    DICT_OUTPUT,
    OPTIONS,
    RecordingStreamer,
    StopsAfter,
    generated,
    penalties,
)
from tests.support.models import (
    EOS,
    FAMILIES,
    PAD,
    assert_partly_accepted,
    assert_same_as_plain,
    character_tokenizer,
    cycle_model,
    left_padded,
    make_model,
    noisy_copy,
    ragged_lengths,
)

RING = 20  # letters of the cycle models
RING_TOKENIZER = character_tokenizer(string.ascii_lowercase[:RING])
RING_PROMPT = torch.tensor([[*range(RING), 0, 1, 2]])  # one cycle and three letters


# Each makes settings of the text that a row gets without them, so that they have something to do.


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


@pytest.fixture
def speculating(llama):
    return enable_speculation(copy.deepcopy(llama))


def ring(permutation=None):
    return cycle_model(permutation or [(letter + 1) % RING for letter in range(RING)])


# Greedy equality


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_generate(family, option):
    model = make_model(family)
    drafting = {"assistant_model": noisy_copy(model), "num_assistant_tokens": 4}
    stats = []
    for rows in (1, 4, 8):
        batch = left_padded(ragged_lengths(rows, seed=rows), seed=rows)
        settings = OPTIONS[option](generated(model, batch))
        stats.append(assert_same_as_plain(model, batch, drafting, max_new_tokens=24, **settings))
    assert_partly_accepted(*stats)


@pytest.mark.parametrize(
    ("family", "attention"),
    [("mistral", "eager"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gemma3", "eager"), ("gemma3", "sdpa")],
)
def test_sliding_window_shorter_than_the_prompt(family, attention):
    model = make_model(family, attn_implementation=attention)
    drafting = {"assistant_model": noisy_copy(model), "num_assistant_tokens": 4}
    stats = [
        assert_same_as_plain(model, left_padded(lengths, seed=len(lengths)), drafting, max_new_tokens=40)
        for lengths in ([12], [12, 5, 12, 9])
    ]
    assert_partly_accepted(*stats)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 8, "eos_token_id": list(range(2, 40))},
        {"forced_eos_token_id": 5},
        {"bad_words_ids": [[28], [60], [25, 25]]},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [60, 28, 11, 25]},
        penalties(),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_option_equals_plain_generate(llama, draft, settings):
    drafting = {"assistant_model": draft, "num_assistant_tokens": 4}
    stats, has_effect = [], False
    for seed in range(3):
        batch = left_padded([6, 1, 4], seed=seed)
        stats.append(assert_same_as_plain(llama, batch, drafting, max_new_tokens=16, **settings))
        without = {name: value for name, value in settings.items() if name == "eos_token_id"}
        bare = llama.generate(**batch, max_new_tokens=16, **without).tolist()
        has_effect |= llama.generate(**batch, max_new_tokens=16, **settings).tolist() != bare
    assert has_effect, "the option changes nothing here"
    assert_partly_accepted(*stats)


# Ends: stop strings, eos, budgets


def ring_drafting(kind, num_tokens):
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": num_tokens}
    return {"assistant_model": ring(), "num_assistant_tokens": num_tokens}


@pytest.mark.parametrize("kind", ["draft", "lookup"])
def test_stop_string_inside_an_accepted_block(kind):
    model, drafting = ring(), ring_drafting(kind, 8)
    stats, num_stock_faults = DecodingStats(), 0
    for first in range(RING):
        window = [(3 + first) % RING, (4 + first) % RING]
        settings = {"stop_strings": [RING_TOKENIZER.decode(window)], "tokenizer": RING_TOKENIZER, "max_new_tokens": 40}
        expected = model.generate(RING_PROMPT, **settings)
        # The last window begins with the prompt's last letter.
        assert expected.shape[1] == RING_PROMPT.shape[1] + (first + 1) % RING + 1
        stats += assert_same_as_plain(model, {"input_ids": RING_PROMPT}, drafting, **settings)
        num_stock_faults += is_stock_wrong(model, expected, drafting, settings)
    print(f"\nacceptance {stats.acceptance_rate:.2f}, {stats.mean_accepted_length:.2f} tokens per drafting round")
    assert stats.mean_accepted_length > 4
    assert num_stock_faults > RING // 2, "transformers' own loop passes this test"


def is_stock_wrong(model, expected, drafting, settings):
    try:
        return model.generate(RING_PROMPT, **drafting, **settings).tolist() != expected.tolist()
    except ValueError:  # it hands the stop strings to the draft model, without a tokenizer
        return True


@pytest.mark.parametrize("kind", ["draft", "lookup"])
def test_eos_at_every_position_of_a_block(kind):
    model, drafting = ring(), ring_drafting(kind, 5)
    speculating = enable_speculation(ring())
    for count in range(1, 14):  # the prefill and two blocks, each of 5 candidates and a bonus token
        text = list(range(3, 3 + count))
        settings = {"eos_token_id": text[-1], "pad_token_id": 0, "max_new_tokens": 30, **DICT_OUTPUT}
        expected = model.generate(RING_PROMPT, **settings)
        streamer = RecordingStreamer()
        actual = speculating.generate(RING_PROMPT, streamer=streamer, trace=True, **drafting, **settings)
        assert actual.sequences.tolist() == expected.sequences.tolist()
        assert actual.sequences[0, RING_PROMPT.shape[1] :].tolist() == text
        assert streamer.puts[1:] == [[token_id] for token_id in text] and streamer.has_ended
        assert len(actual.scores) == len(actual.logits) == count
        torch.testing.assert_close(actual.scores, expected.scores, atol=1e-4, rtol=0)
        stats = actual.speculation_stats
        assert traced_text(stats, 0) == text[1:]
        assert stats.tokens == count and stats.drafting_tokens == count - 1
        assert sum(stats.accepted.values()) == sum(trace.num_accepted for trace in stats.traces)


def traced_text(stats, row):
    """The tokens of a row after its first one, which the prefill gave, put together from the trace."""
    text = []
    for trace in stats.traces:
        if trace.row == row:
            text += [*trace.proposed[: trace.num_accepted]]
            text += [] if trace.next_token_id is None else [trace.next_token_id]
    return text


@pytest.mark.parametrize("budget", [1, 2, 3, 30])
def test_ragged_rows_equal_the_batch_and_their_own_runs(llama, draft, budget):
    drafting, stats = {"assistant_model": draft}, []
    for seed in range(4):
        batch = left_padded([1, 9, 4, 1, 12], seed=seed)
        stats.append(assert_same_as_plain(llama, batch, drafting, max_new_tokens=budget))
        together = llama.generate(**batch, max_new_tokens=budget)
        for row, mask in enumerate(batch["attention_mask"]):
            alone = llama.generate(batch["input_ids"][row, mask == 1][None], max_new_tokens=budget)[0]
            assert together[row, (mask == 0).sum() :].tolist()[: len(alone)] == alone.tolist()
    if budget < 3:  # the prefill and the last round give a token without a candidate
        assert not any(run.drafting_rounds for run in stats)
    else:
        assert_partly_accepted(*stats)


def test_row_finished_long_before_the_others():
    eos = RING - 1
    unsure = list(range(1, RING)) + [0]
    unsure[3], unsure[8], unsure[13] = unsure[8], unsure[13], unsure[3]
    prompts = [[16, 17], [0], [6, 7, 8]]  # 2, 19 and 11 letters before the end
    batch = {
        "input_ids": torch.tensor([[eos] * (3 - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (3 - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
    drafting = {"assistant_model": ring(unsure), "num_assistant_tokens": 4, "trace": True}
    settings = {"eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": 40}
    stats = assert_same_as_plain(ring(), batch, drafting, **settings)
    assert_partly_accepted(stats)
    assert stats.tokens == 2 + 19 + 11
    assert [len(traced_text(stats, row)) for row in range(3)] == [1, 18, 10]


def test_penalty_does_not_count_padding_with_the_eos_id():
    eos = 13
    model = cycle_model([(letter + 1) % RING for letter in range(RING)], runner_up=0.8)
    batch = {
        "input_ids": torch.tensor([[eos, eos, 10], [5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
    }
    settings = {"eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": 8}
    penalty = {"logits_processor": [TokenPenalties(1.3, pad_token_id=eos)]}
    drafting = {"assistant_model": ring(), "num_assistant_tokens": 4}
    stats = assert_same_as_plain(model, batch, drafting, **settings, **penalty)
    assert stats.tokens == 3 + 6 and stats.mean_accepted_length > 2
    counting = assert_same_as_plain(model, batch, drafting, **settings, logits_processor=[TokenPenalties(1.3)])
    assert counting.tokens == 8 + 6, "a penalty that counts the padding misses the end"


# Vocabularies


def padded_vocabulary(model, size):
    resized = copy.deepcopy(model)
    resized.resize_token_embeddings(size, mean_resizing=False)
    return resized


@pytest.mark.parametrize("sizes", [(64, 72), (72, 64)], ids=str)
def test_vocabularies_padded_to_different_sizes(llama, draft, sizes):
    target, other = padded_vocabulary(llama, sizes[0]), padded_vocabulary(draft, sizes[1])
    batch = left_padded([5, 2, 8])
    decodable = {"logits_processor": [UndecodableMask(64, PAD, EOS)], "max_new_tokens": 24}
    stats = assert_same_as_plain(target, batch, {"assistant_model": other}, **decodable)
    assert_partly_accepted(stats)
    speculating, texts, sampled = enable_speculation(target), [], []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        texts.append(speculating.generate(**batch, assistant_model=other, do_sample=True, **decodable).tolist())
        sampled.append(speculating.speculation_stats)
    assert texts[0] == texts[2] != texts[1]
    assert max(map(max, texts[0] + texts[1])) < 64
    assert_partly_accepted(*sampled)


def test_draft_with_another_tokenizer_goes_to_transformers_or_is_refused(llama):
    target_tokenizer = character_tokenizer(string.ascii_letters + string.digits + "+-")
    draft_tokenizer = character_tokenizer("-+" + string.digits[::-1] + string.ascii_letters[::-1] + "@$%&")
    other = make_model("llama", vocab_size=68)
    settings = {"max_new_tokens": 12, "tokenizer": target_tokenizer}
    speculating = enable_speculation(copy.deepcopy(llama))
    batch = left_padded([6])
    actual = speculating.generate(**batch, assistant_model=other, assistant_tokenizer=draft_tokenizer, **settings)
    assert actual.tolist() == llama.generate(**batch, **settings).tolist()
    assert speculating.speculation_stats is None, "our loop cannot translate between tokenizers"
    with pytest.raises(ValueError, match="another tokenizer"):
        speculating.generate(
            **left_padded([6, 3]), assistant_model=other, assistant_tokenizer=draft_tokenizer, **settings
        )


# Options


def test_streamer_gets_what_plain_generate_gives_it(llama, draft, speculating):
    for drafting in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 4}):
        expected, actual = RecordingStreamer(), RecordingStreamer()
        llama.generate(**left_padded([6]), max_new_tokens=20, streamer=expected)
        speculating.generate(**left_padded([6]), max_new_tokens=20, streamer=actual, **drafting)
        assert actual.puts == expected.puts and actual.has_ended
        assert_partly_accepted(speculating.speculation_stats)


def test_streamer_of_a_batch_is_refused(draft, speculating):
    with pytest.raises(ValueError, match="`streamer`.*2 rows"):
        speculating.generate(**left_padded([6, 2]), streamer=RecordingStreamer(), assistant_model=draft)


def test_on_round_sees_every_verification_before_its_tokens_are_committed(llama, draft):
    batch, seen = left_padded([6, 2]), []

    def on_round(rows, candidates, verification):
        committed = [request.num_committed for _, request in rows.live()]
        seen.append((committed, candidates.lengths.tolist(), verification.num_accepted.tolist()))

    drafting = {"assistant_model": draft, "on_round": on_round}
    stats = assert_same_as_plain(llama, batch, drafting, max_new_tokens=20)
    assert len(seen) == stats.target_forwards
    assert seen[0] == ([6, 2], [0, 0], [0, 0])
    assert seen[1][0] == [7, 3]
    assert sum(sum(lengths) for _, lengths, _ in seen) == sum(stats.proposed.values())
    assert_partly_accepted(stats)


def test_trace_tells_the_text(llama, draft, speculating):
    batch = left_padded([6, 2, 4])
    sequences = speculating.generate(**batch, assistant_model=draft, trace=True, max_new_tokens=20)
    for row, ids in enumerate(sequences[:, 7:].tolist()):
        text = traced_text(speculating.speculation_stats, row)
        assert ids == text + [PAD] * (len(ids) - len(text))
    speculating.generate(**batch, assistant_model=draft, max_new_tokens=20)
    assert speculating.speculation_stats.traces == []


def test_scores_and_logits_equal_those_of_plain_generate(llama, draft, speculating):
    batch = left_padded([3, 7, 5])
    settings = {"max_new_tokens": 20, "repetition_penalty": 1.2, **DICT_OUTPUT}
    settings["eos_token_id"] = llama.generate(**batch, **settings).sequences[0, 7 + 6].item()
    expected = llama.generate(**batch, **settings)
    actual = speculating.generate(**batch, assistant_model=draft, **settings)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert_partly_accepted(actual.speculation_stats)
    texts = expected.sequences[:, 7:].tolist()
    lengths = [text.index(settings["eos_token_id"]) + 1 if settings["eos_token_id"] in text else 20 for text in texts]
    assert min(lengths) < max(lengths)
    assert len(actual.scores) == len(actual.logits) == max(lengths)
    transitions = [
        out.compute_transition_scores(of.sequences, of.scores, normalize_logits=True)
        for out, of in ((llama, expected), (speculating, actual))
    ]
    for row, length in enumerate(lengths):
        for step in range(max(lengths)):
            if step < length:
                for name in ("scores", "logits"):
                    pair = actual[name][step][row], expected[name][step][row]
                    torch.testing.assert_close(*pair, atol=1e-4, rtol=0)
            else:
                assert actual.scores[step][row].argmax() == PAD
        torch.testing.assert_close(transitions[1][row, :length], transitions[0][row, :length], atol=1e-4, rtol=0)
        assert transitions[1][row, length:].eq(0).all()


def test_several_return_sequences(llama, draft, speculating):
    batch = left_padded([6, 2])
    sampling = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12}
    best = assert_same_as_plain(llama, batch, {"assistant_model": draft}, top_k=1, **sampling)
    assert_partly_accepted(best)
    torch.manual_seed(0)
    sequences = speculating.generate(**batch, assistant_model=draft, temperature=2.0, **sampling)
    assert sequences.shape[0] == 6 and len(set(map(tuple, sequences.tolist()))) == 6
    sampling["num_return_sequences"] = 1
    repeated = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in batch.items()}
    torch.manual_seed(0)
    again = speculating.generate(**repeated, assistant_model=draft, temperature=2.0, **sampling)
    assert sequences.tolist() == again.tolist()


def test_max_time_ends_after_the_round_in_which_it_ran_out(llama, draft):
    drafting, batch = {"assistant_model": draft}, left_padded([6, 2])
    assert assert_same_as_plain(llama, batch, drafting, max_new_tokens=20, max_time=1e-9).tokens == 2
    assert assert_same_as_plain(llama, batch, drafting, max_new_tokens=20, max_time=1e9).tokens > 20


def test_prompt_lookup_in_a_batch(llama):
    stats = [
        assert_same_as_plain(
            llama, left_padded([9, 3, 6], seed=seed), {"prompt_lookup_num_tokens": 4}, max_new_tokens=24, **settings
        )
        for seed in range(3)
        for settings in ({}, penalties(), {"no_repeat_ngram_size": 3})
    ]
    assert_partly_accepted(*stats)


@pytest.mark.parametrize("place", ["call", "generation_config", "target", "draft"])
def test_assistant_settings_are_honoured_and_not_written_back(llama, place):
    batch = left_padded([6, 2])
    for wanted in (
        {"num_assistant_tokens": 1},
        {"num_assistant_tokens": 7},
        {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristic"},
        {"num_assistant_tokens": 7, "assistant_confidence_threshold": 0.9},
    ):
        target, draft = enable_speculation(copy.deepcopy(llama)), noisy_copy(llama)
        owner = {"target": target, "draft": draft}.get(place)
        if owner is not None:
            owner.generation_config.update(**wanted)
        given = dict(wanted) if place == "call" else {"max_new_tokens": 24}
        if place == "generation_config":
            given = {"generation_config": GenerationConfig(max_new_tokens=24, **wanted)}
        before = [repr(vars(config)) for config in configs_of(target, draft, given)]
        ids = target.generate(**batch, assistant_model=draft, trace=True, **{"max_new_tokens": 24} | given)
        assert [repr(vars(config)) for config in configs_of(target, draft, given)] == before
        assert ids.tolist() == llama.generate(**batch, max_new_tokens=24).tolist()
        assert_partly_accepted(target.speculation_stats)
        check_block_sizes(wanted, [len(trace.proposed) for trace in target.speculation_stats.traces])


def configs_of(target, draft, given):
    return [m.generation_config for m in (target, draft)] + [g for g in given.values() if hasattr(g, "to_dict")]


def check_block_sizes(wanted, sizes):
    if "num_assistant_tokens_schedule" in wanted:
        assert sizes[0] == 4 and max(sizes) > 4 and min(sizes) < 4
    elif "assistant_confidence_threshold" in wanted:
        assert max(sizes[:4]) < 7
    else:
        assert set(sizes[:2]) == {max(sizes)} == {wanted["num_assistant_tokens"]}


def test_any_stopping_criterion_ends_a_row_inside_a_block(llama, draft):
    stats = []
    for seed in range(3):
        batch = left_padded([6, 2, 4], seed=seed)
        text = generated(llama, batch)
        for criteria in ([StopsAfter(text[3:5])], [StopsAfter([63], length=6 + 8)], [StopsAfter(text[9:10], 20)]):
            drafting = {"assistant_model": draft}
            stats.append(assert_same_as_plain(llama, batch, drafting, max_new_tokens=24, stopping_criteria=criteria))
    assert_partly_accepted(*stats)


def test_max_length_counts_the_prompt(llama, draft):
    drafting, batch = {"assistant_model": draft}, left_padded([6, 2])
    stats = [assert_same_as_plain(llama, batch, drafting, max_length=length) for length in (7, 8, 26)]
    assert [run.tokens for run in stats[:2]] == [2, 4]
    assert_partly_accepted(*stats)


@pytest.mark.parametrize("num_tokens", [3, 12])
def test_static_cache_has_room_for_long_blocks_of_lagging_rows(llama, draft, num_tokens):
    drafting = {"assistant_model": draft, "num_assistant_tokens": num_tokens}
    settings = {"max_new_tokens": 20, "cache_implementation": "static"}
    stats = [
        assert_same_as_plain(llama, left_padded(lengths, seed=seed), drafting, **settings)
        for lengths in ([6], [6, 2, 11])
        for seed in range(4)
    ]
    assert_partly_accepted(*stats)


def test_masked_columns_inside_a_prompt_do_not_count(llama, draft):
    batch = left_padded([8, 5])
    batch["attention_mask"][:, 4] = 0
    assert_partly_accepted(assert_same_as_plain(llama, batch, {"assistant_model": draft}, max_new_tokens=24))


# The enabled model


def test_enabling_keeps_the_object_and_its_class(llama):
    model = copy.deepcopy(llama)
    names = list(vars(model)), list(model.state_dict())
    enabled = enable_speculation(model)
    assert enabled is model and isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM" and type(model).__module__ == LlamaForCausalLM.__module__
    subclass = type(model)
    assert enable_speculation(model) is model and type(model) is subclass
    assert (list(vars(model)), list(model.state_dict())) == names
    assert disable_speculation(model) is model and type(model) is LlamaForCausalLM
    assert disable_speculation(model) is model and type(model) is LlamaForCausalLM


def test_disabling_forgets_the_statistics_and_brings_back_the_old_refusal(llama, draft, speculating):
    speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)
    disable_speculation(speculating)
    assert "speculation_stats" not in vars(speculating)
    with pytest.raises(ValueError, match="batch_size = 1"):
        speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sample", "beams"])
def test_generate_without_a_drafter_is_untouched(llama, speculating, settings):
    outputs, states = [], []
    for model in (llama, speculating):
        torch.manual_seed(0)
        outputs.append(model.generate(**left_padded([6, 2]), max_new_tokens=12, **DICT_OUTPUT, **settings))
        states.append(torch.get_rng_state())
    assert type(outputs[0]) is type(outputs[1])
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    torch.testing.assert_close(outputs[1].scores, outputs[0].scores, atol=0, rtol=0)
    assert torch.equal(*states)
    assert "speculation_stats" not in vars(speculating)
    assert isinstance(outputs[1], GenerateDecoderOnlyOutput) or "num_beams" in settings


def test_saved_model_loads_as_the_plain_class(speculating, draft, tmp_path):
    speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)
    speculating.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded.state_dict(), speculating.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_speculation_and_weights(draft, duplicate):
    plain = make_model()  # not the shared one: after a pass for hidden states no model can be pickled
    speculating = enable_speculation(copy.deepcopy(plain))
    speculating.generate(**left_padded([6, 2]), assistant_model=draft, max_new_tokens=4)
    other = duplicate(speculating)
    assert type(other) is type(speculating) and other is not speculating
    torch.testing.assert_close(other.state_dict(), speculating.state_dict(), atol=0, rtol=0)
    with torch.no_grad():
        other.lm_head.weight.zero_()  # its own weights, not shared ones
    batch, settings = left_padded([6, 2]), {"assistant_model": draft, "max_new_tokens": 12}
    expected = plain.generate(**batch, max_new_tokens=12)
    assert speculating.generate(**batch, **settings).tolist() == expected.tolist()
    assert other.generate(**batch, **settings).tolist() != expected.tolist()
    assert type(disable_speculation(other)) is LlamaForCausalLM
    assert type(speculating) is not LlamaForCausalLM


def test_lora_model_generates_as_without_speculation(llama, draft):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    lora = peft.get_peft_model(copy.deepcopy(llama), settings).eval()
    batch = left_padded([6, 2, 4])
    expected = lora.generate(**batch, max_new_tokens=24)
    assert expected.tolist() != llama.generate(**batch, max_new_tokens=24).tolist()
    assert enable_speculation(lora) is lora
    target = lora.get_base_model()
    for drafting in ({"assistant_model": noisy_copy(target)}, {"assistant_model": draft}):
        assert lora.generate(**batch, max_new_tokens=24, **drafting).tolist() == expected.tolist()
        assert_partly_accepted(target.speculation_stats)
    assert type(disable_speculation(lora).get_base_model()) is LlamaForCausalLM


def test_peft_model_as_draft(llama):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=1, target_modules=["v_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(copy.deepcopy(llama), settings).eval()
    stats = [
        assert_same_as_plain(llama, left_padded([6, 2], seed=seed), {"assistant_model": lora}, max_new_tokens=24)
        for seed in range(4)
    ]
    assert_partly_accepted(*stats)


def test_peft_model_that_learns_a_prompt_is_refused(llama):
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="learn a prompt"):
        enable_speculation(peft.get_peft_model(copy.deepcopy(llama), settings))


@pytest.mark.slow
def test_compiled_forward():
    plain = make_model(num_hidden_layers=1)
    model, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    model.forward = torch.compile(model.forward, backend="eager")
    batch = left_padded([6, 2])
    actual = model.generate(**batch, assistant_model=draft, max_new_tokens=6, num_assistant_tokens=2)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=6).tolist()
    assert_partly_accepted(model.speculation_stats)


def test_compiled_module_is_looked_through(llama, draft):
    model = copy.deepcopy(llama)
    compiled = torch.compile(model, backend="eager")
    assert enable_speculation(compiled) is compiled
    batch = left_padded([6, 2])
    actual = compiled.generate(**batch, assistant_model=draft, max_new_tokens=24)
    assert actual.tolist() == llama.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_accepted(model.speculation_stats)


def test_threads_share_a_model(llama, draft, speculating):
    batches = [left_padded(ragged_lengths(3, seed), seed) for seed in range(6)]
    expected = [llama.generate(**batch, max_new_tokens=24).tolist() for batch in batches]
    actual = [None] * len(batches)
    barrier = threading.Barrier(3)

    def work(indices, drafting):
        barrier.wait()
        for index in indices:
            actual[index] = speculating.generate(**batches[index], max_new_tokens=24, **drafting).tolist()

    jobs = [((0, 1), {"assistant_model": draft}), ((2, 3), {"prompt_lookup_num_tokens": 3}), ((4, 5), {})]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == expected
    assert speculating.config._attn_implementation == draft.config._attn_implementation == "sdpa"


def test_greedy_call_leaves_flags_configs_and_random_state(llama, draft, speculating):
    speculating.train()
    speculating.model.layers[1].eval()
    models = speculating, draft

    def state():
        return [
            [[module.training for module in model.modules()] for model in models],
            [(repr(model.config), repr(model.generation_config)) for model in models],
            [(model.config._attn_implementation, model.config.use_cache) for model in models],
            torch.get_rng_state().tolist(),
        ]

    speculating.config.use_cache = False  # as Trainer leaves it
    before = state()
    batch = left_padded([6, 2])
    actual = speculating.generate(**batch, assistant_model=draft, max_new_tokens=16, use_cache=True)
    assert state() == before
    assert actual.tolist() == llama.generate(**batch, max_new_tokens=16).tolist()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_failure_in_a_call_leaves_the_attention_as_it_was(attention):
    plain = make_model(attn_implementation=attention)
    model, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    batch, used = left_padded([6, 2]), set()

    def fail(rows, candidates, verification):
        used.add(model.config._attn_implementation)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        model.generate(**batch, assistant_model=draft, on_round=fail)
    assert used == {"hf_specgen_grouped" if attention == "sdpa" else "eager"}
    assert model.config._attn_implementation == draft.config._attn_implementation == attention
    actual = model.generate(**batch, assistant_model=draft, max_new_tokens=16)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=16).tolist()
