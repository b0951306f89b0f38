"""`model.generate` with a drafter against the plain one: families, options and results."""

import copy

import pytest
import torch

from hf_specgen import (
    FrequencyPenalty,
    enable_speculation,
)
from tests.support.generate_calls import (
    DICT_OUTPUT,
    OPTIONS,
    RecordingStreamer,
    StopsAfter,
    generated,
    penalties,
    traced_text,
)
from tests.support.models import (
    FAMILIES,
    PAD,
    assert_partly_accepted,
    assert_same_as_plain,
    left_padded,
    make_model,
    noisy_copy,
    ragged_lengths,
)


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


@pytest.fixture
def speculating(llama):
    return enable_speculation(copy.deepcopy(llama))


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


@pytest.mark.slow
def test_prompt_lookup_in_a_batch(llama):
    stats = [
        assert_same_as_plain(
            llama, left_padded([9, 3, 6], seed=seed), {"prompt_lookup_num_tokens": 4}, max_new_tokens=24, **settings
        )
        for seed in range(3)
        for settings in ({}, penalties(), {"no_repeat_ngram_size": 3})
    ]
    assert_partly_accepted(*stats)


@pytest.mark.slow
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


def test_prompt_length_of_a_penalty_counts_in_both_loops(llama):
    ours, draft = enable_speculation(copy.deepcopy(llama)), noisy_copy(llama)
    batch = left_padded([6])
    kwargs = {"logits_processor": [FrequencyPenalty(8.0, scope="generated", prompt_length=2)], "max_new_tokens": 12}
    expected = llama.generate(**batch, **kwargs)
    assert torch.equal(ours.generate(**batch, **kwargs, assistant_model=draft), expected)
