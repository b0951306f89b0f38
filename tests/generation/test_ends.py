"""Where rows end: stop strings, eos, budgets and other criteria, token for token as in plain `generate`."""

import copy
import string

import pytest
import torch

from hf_specgen import (
    DecodingStats,
    TokenPenalties,
    enable_speculation,
)
from tests.support.generate_calls import (
    DICT_OUTPUT,
    RecordingStreamer,
    traced_text,
)
from tests.support.models import (
    assert_partly_accepted,
    assert_same_as_plain,
    character_tokenizer,
    cycle_model,
    left_padded,
    noisy_copy,
)

RING = 20  # letters of the cycle models
RING_TOKENIZER = character_tokenizer(string.ascii_lowercase[:RING])
RING_PROMPT = torch.tensor([[*range(RING), 0, 1, 2]])  # one cycle and three letters


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


@pytest.fixture
def speculating(llama):
    return enable_speculation(copy.deepcopy(llama))


def ring(permutation=None):
    return cycle_model(permutation or [(letter + 1) % RING for letter in range(RING)])


def ring_drafting(kind, num_tokens):
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": num_tokens}
    return {"assistant_model": ring(), "num_assistant_tokens": num_tokens}


@pytest.mark.slow
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
