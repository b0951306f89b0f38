"""What drafters propose, what they feed, and drafters of one's own."""

import copy

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from hf_specgen import (
    Candidates,
    CausalLMDrafter,
    Decoder,
    DecodingRules,
    Drafter,
    FrequencyPenalty,
    PromptLookupDrafter,
    Request,
)
from hf_specgen.drafters.causal_lm import LONG_PREFILL
from hf_specgen.engine.batch import Rows
from tests.support.models import (
    EOS,
    assert_partly_accepted,
    assert_same_as_plain,
    cycle_model,
    left_padded,
    make_model,
    noisy_copy,
    take_slot,
)

RING = [(letter + 1) % 20 for letter in range(20)]


def placed(model, drafter, *requests):
    """Rows with one slot for each request, before anything was fed."""
    rows = Rows(model, len(requests), draft_cache=drafter.make_cache(len(requests)))
    for request in requests:
        take_slot(rows, request)
    rows.span = slice(0, len(requests))
    return rows


@torch.no_grad()
def blocks(drafter, rows, *max_tokens):
    """What the drafter proposes, as one list per row."""
    candidates = drafter.draft(rows, torch.tensor(max_tokens))
    assert not any(request.error for _, request in rows.live())
    return [ids[:length] for ids, length in zip(candidates.token_ids.tolist(), candidates.lengths, strict=True)]


class Feed:
    """Records the shape of the tokens in every pass of a model."""

    def __init__(self, model):
        self.shapes = []
        model.register_forward_pre_hook(self.add, with_kwargs=True)

    def add(self, module, args, kwargs):
        self.shapes.append(tuple(kwargs["input_ids"].shape))


# Prompt lookup


@pytest.mark.parametrize(
    ("ids", "block"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8, 5, 6]),
        ([5, 6, 7, 9, 6, 8, 5, 6], [7, 9, 6, 8]),  # the longer ending wins over the later one
        ([5, 7, 8, 5, 9, 4, 5], [9, 4, 5, 9]),  # of two occurrences the later one
        ([5, 6, 5, 6, 5, 6], [5, 6, 5, 6]),
        ([4, 4], [4, 4, 4, 4]),
        ([3, 4, 5], []),
        ([7], []),
        ([5, 6, EOS, 9, 5], [6, EOS]),  # nothing is worth proposing after the end
        ([EOS, 6, EOS], [6, EOS]),
    ],
    ids=str,
)
def test_lookup_continues_what_followed_last_time(llama, ids, block):
    drafter = PromptLookupDrafter(4)
    request = Request(ids, 20, DecodingRules(eos_token_ids=frozenset([EOS])))
    assert blocks(drafter, placed(llama, drafter, request), 9) == [block]


def test_lookup_is_bounded_by_the_ngram_size_and_the_room(llama):
    ids = [5, 6, 7, 9, 6, 8, 5, 6]
    for size, block in ((1, [8, 5, 6, 8]), (2, [7, 9, 6, 8])):
        drafter = PromptLookupDrafter(4, max_ngram_size=size)
        rows = placed(llama, drafter, Request(ids, 20), Request(ids, 20), Request(ids, 20))
        assert blocks(drafter, rows, 9, 2, 0) == [block, block[:2], []]


def test_lookup_sees_committed_tokens_and_forgets_the_others(llama):
    drafter = PromptLookupDrafter(3)
    request = Request([5, 6, 7, 5], 20)
    rows = placed(llama, drafter, request)
    assert blocks(drafter, rows, 9) == [[6, 7, 5]]
    assert blocks(drafter, rows, 9) == [[6, 7, 5]]
    rows.commit(0, [6, 9])
    assert blocks(drafter, rows, 9) == [[]]
    rows.commit(0, [6])
    assert blocks(drafter, rows, 9) == [[9, 6, 9]]
    rows.leave(0)
    take_slot(rows, Request([8, 3], 20))
    assert blocks(drafter, rows, 9) == [[]]


def test_lookup_needs_no_model(llama):
    drafter = PromptLookupDrafter()
    assert drafter.model is None and drafter.make_cache(3) is None
    assert drafter.draft(placed(llama, drafter, Request([4, 4], 9)), torch.tensor([3])).probs is None
    assert drafter.num_forwards == 0


# A causal language model


def test_causal_drafts_its_own_best_tokens(llama):
    model = cycle_model(RING)
    drafter = CausalLMDrafter(model, 4)
    rows = placed(model, drafter, Request([3, 4], 20), Request([17], 20), Request([9, 10, 11], 20))
    assert blocks(drafter, rows, 9, 9, 2) == [[5, 6, 7, 8], [18, 19, 0, 1], [12, 13]]
    assert drafter.num_forwards == 4
    assert blocks(drafter, rows, 0, 0, 0) == [[], [], []]
    assert drafter.num_forwards == 4


def test_causal_applies_the_processors_of_the_request_once(llama):
    drafter = CausalLMDrafter(copy.deepcopy(llama), 5)
    rules = DecodingRules(LogitsProcessorList([FrequencyPenalty(1.5)]))
    prompt = left_padded([6])["input_ids"]
    (block,) = blocks(drafter, placed(llama, drafter, Request(prompt[0].tolist(), 20, rules)), 9)
    settings = {"logits_processor": [FrequencyPenalty(1.5)], "max_new_tokens": 5}
    assert block == llama.generate(prompt, **settings)[0, 6:].tolist()
    assert block != llama.generate(prompt, max_new_tokens=5)[0, 6:].tolist()


def test_sampled_candidates_come_with_their_law(llama):
    drafter = CausalLMDrafter(copy.deepcopy(llama), 3, temperature=0.5)
    rules = DecodingRules(LogitsProcessorList([TemperatureLogitsWarper(4.0)]), do_sample=True)
    prompt = left_padded([6])["input_ids"][0].tolist()
    rows = placed(llama, drafter, *[Request(prompt, 20, rules, seed) for seed in range(6)], Request(prompt, 20))
    candidates = drafter.draft(rows, torch.full((7,), 9))
    assert candidates.probs.shape == (7, 3, llama.config.vocab_size)
    for row in range(6):
        ids = torch.tensor([prompt + candidates.token_ids[row, :2].tolist()])
        with torch.no_grad():
            expected = (llama(ids).logits[0, 5:] / 4.0 / 0.5).softmax(dim=-1)
        torch.testing.assert_close(candidates.probs[row], expected, atol=1e-5, rtol=0)
    assert len(set(map(tuple, candidates.token_ids[:6].tolist()))) > 1
    assert candidates.token_ids[6].tolist() == llama.generate(torch.tensor([prompt]), max_new_tokens=3)[0, 6:].tolist()


def test_confidence_threshold_keeps_the_doubtful_token():
    model = cycle_model(RING)
    with torch.no_grad():
        model.lm_head.weight[0, 7] = model.lm_head.weight[8, 7] - 0.02  # after 7 two tokens are nearly as good
    prompts = [[3, 4], [6], [12]]
    for threshold, expected in (
        (0.0, [[5, 6, 7, 8, 9], [7, 8, 9, 10, 11], [13, 14, 15, 16, 17]]),
        (0.9, [[5, 6, 7, 8], [7, 8], [13, 14, 15, 16, 17]]),
    ):
        drafter = CausalLMDrafter(model, 5, probability_threshold=threshold)
        rows = placed(model, drafter, *[Request(prompt, 20) for prompt in prompts])
        assert blocks(drafter, rows, 9, 9, 9) == expected


def test_doubt_in_every_row_ends_the_draft_early():
    model = cycle_model(RING)
    drafter = CausalLMDrafter(model, 5, probability_threshold=0.9)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    assert blocks(drafter, placed(model, drafter, Request([3], 20), Request([8], 20)), 9, 9) == [[4], [9]]
    assert drafter.num_forwards == 1


def test_heuristic_schedule_of_each_row():
    draft = cycle_model([*RING[:4], 6, 5, *RING[6:]])  # wrong after 4 and after 5
    first, second = Request([0], 19), Request([10], 19)
    drafter = CausalLMDrafter(draft, 2, schedule="heuristic")
    sizes = {first: [], second: []}

    def on_round(rows, candidates, verification):
        for row, request in rows.live():
            sizes[request].append(int(candidates.lengths[row]))

    decoder = Decoder(cycle_model(RING), drafter, max_batch_size=2, on_round=on_round)
    for _ in decoder.run([first, second]):
        pass
    assert first.token_ids == [*range(1, 20)]
    assert sizes[first] == [0, 2, 4, 3, 2, 4, 4]  # the last 4 is what the budget leaves room for
    assert sizes[second] == [0, 2, 4, 6, 3, 2]  # as are 3 and 2 here
    assert drafter.num_assistant_tokens == 2
    assert_partly_accepted(decoder.stats)


def test_draft_model_is_fed_nothing_twice_but_the_last_tokens():
    model = cycle_model(RING)
    feed = Feed(model)
    rows = placed(cycle_model(RING), drafter := CausalLMDrafter(model, 4), request := Request([5, 6, 7], 40))
    feed.shapes.clear()
    rows.commit(0, [8])
    assert blocks(drafter, rows, 9) == [[9, 10, 11, 12]]
    assert feed.shapes == [(1, 4), (1, 1), (1, 1), (1, 1)]  # the last candidate is not fed
    feed.shapes.clear()
    rows.commit(0, [9, 10, 11, 12, 13])  # accepted whole: the last candidate and the bonus token are missing
    assert blocks(drafter, rows, 9) == [[14, 15, 16, 17]]
    assert feed.shapes == [(1, 2), (1, 1), (1, 1), (1, 1)]
    feed.shapes.clear()
    rows.commit(0, [14, 3])  # refused: the cache is cut behind 14
    assert rows.draft_cache.lengths.tolist() == [request.num_committed - 1]
    assert blocks(drafter, rows, 2) == [[4, 5]]
    assert feed.shapes == [(1, 1), (1, 1)]
    rows.commit(0, [4])
    rows.commit(0, [9, 9, 9])  # a round in which nothing was drafted
    feed.shapes.clear()
    assert blocks(drafter, rows, 1) == [[10]]
    assert feed.shapes == [(1, 4)]


def test_ragged_rows_feed_the_draft_model_two_tokens_at_most(llama):
    draft = noisy_copy(llama)
    requests = [Request(left_padded([4 + row], seed=row)["input_ids"][0].tolist(), 24) for row in range(4)]
    decoder = Decoder(llama, CausalLMDrafter(draft, 4), max_batch_size=4)
    feed = Feed(draft)
    for _ in decoder.run(requests):
        pass
    assert feed.shapes[0] == (4, 8)
    assert {columns for _, columns in feed.shapes[1:]} == {1, 2}
    assert_partly_accepted(decoder.stats)


def test_long_prompt_of_a_new_request_does_not_pad_the_others(llama):
    draft = noisy_copy(llama)
    length = 3 * LONG_PREFILL
    texts = [left_padded([size], seed=size)["input_ids"] for size in (4, length)]
    early, late = [Request(text[0].tolist(), 24) for text in texts]
    decoder = Decoder(llama, CausalLMDrafter(draft, 4), max_batch_size=2)
    rounds = decoder.run([early])
    for _ in range(3):
        next(rounds)
    feed = Feed(draft)
    decoder.add(late)
    for _ in rounds:
        pass
    assert feed.shapes[0] == (1, length)
    assert all(columns <= 2 for _, columns in feed.shapes[1:]) and (2, 1) in feed.shapes
    for text, request in zip(texts, (early, late), strict=True):
        assert request.token_ids == llama.generate(text, max_new_tokens=24)[0, text.shape[1] :].tolist()
    assert_partly_accepted(decoder.stats)


def test_long_prompts_that_arrive_together_are_fed_together(llama):
    draft = noisy_copy(llama)
    requests = [Request(left_padded([40 + row], seed=row)["input_ids"][0].tolist(), 6) for row in range(2)]
    decoder = Decoder(llama, CausalLMDrafter(draft, 4), max_batch_size=2)
    feed = Feed(draft)
    for _ in decoder.run(requests):
        pass
    assert feed.shapes[0] == (2, 42)


@pytest.mark.parametrize("sizes", [(64, 72), (72, 64)], ids=str)
def test_draft_scores_take_the_size_of_the_targets_vocabulary(sizes):
    target, draft = make_model(vocab_size=sizes[0]), make_model(vocab_size=sizes[1], seed=3)
    rules = DecodingRules(LogitsProcessorList([TemperatureLogitsWarper(8.0)]), do_sample=True)
    drafter = CausalLMDrafter(draft, 3)
    prompt = [3, sizes[0] - 1, 5]  # in one of the cases an id that the draft does not have
    rows = placed(target, drafter, *[Request(prompt, 20, rules, seed) for seed in range(16)])
    candidates = drafter.draft(rows, torch.full((16,), 9))
    assert candidates.probs.shape == (16, 3, sizes[0])
    torch.testing.assert_close(candidates.probs.sum(dim=-1), torch.ones(16, 3))
    assert candidates.probs[..., 64:].eq(0).all() and candidates.token_ids.max() < 64


# Drafters of one's own


class Remembering(Drafter):
    """Knows the texts in advance and proposes them, with a mistake in every third place."""

    def __init__(self, texts):
        self.texts = texts
        self.num_observed = 0

    def make_cache(self, rows):
        return None

    def draft(self, rows, max_tokens):
        token_ids = torch.zeros(rows.num_spanned, 3, dtype=torch.long)
        lengths = torch.zeros(rows.num_spanned, dtype=torch.long)
        for row, request in rows.live():
            start = len(request.token_ids)
            block = self.texts[request.batch_row][start : start + 3][: int(max_tokens[row])]
            block = [(id_ + 1) % 64 if (start + i) % 3 == 2 else id_ for i, id_ in enumerate(block)]
            token_ids[row, : len(block)] = torch.tensor(block, dtype=torch.long)
            lengths[row] = len(block)
        return Candidates(token_ids, lengths)

    def observe(self, rows, candidates, outputs):
        self.num_observed += 1


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "top-1"])
def test_three_methods_make_a_drafter(llama, do_sample):
    batch = left_padded([6, 1, 9, 4])
    texts = llama.generate(**batch, max_new_tokens=24)[:, 9:].tolist()
    drafter = Remembering(texts)
    settings = {"do_sample": True, "top_k": 1} if do_sample else {}
    stats = assert_same_as_plain(llama, batch, {"assistant_model": drafter}, max_new_tokens=24, **settings)
    assert drafter.num_observed == stats.target_forwards
    assert stats.draft_forwards == 0
    assert_partly_accepted(stats)


class Watching(PromptLookupDrafter):
    """Compares the target's hidden states with those of a plain pass over the same tokens."""

    target_layer_ids = (1, 0)

    def __init__(self, plain):
        super().__init__(3)
        self.plain = plain
        self.num_compared = 0

    def observe(self, rows, candidates, outputs):
        for row, request in rows.live():
            ids = request.committed_from(0) + candidates.token_ids[row, : candidates.lengths[row]].tolist()
            first = request.num_committed - 1 if request.token_ids else 0
            with torch.no_grad():
                expected = self.plain(torch.tensor([ids]), output_hidden_states=True).hidden_states
            for layer in self.target_layer_ids:
                actual = outputs.hidden_states[layer + 1][row, : len(ids) - first]
                torch.testing.assert_close(actual, expected[layer + 1][0, first:], atol=1e-4, rtol=1e-4)
                self.num_compared += len(actual)


def test_wanted_hidden_states_reach_observe(llama):
    drafter = Watching(copy.deepcopy(llama))  # transformers leaves hooks on a model that is asked for its states
    stats = assert_same_as_plain(llama, left_padded([6, 1, 9]), {"assistant_model": drafter}, max_new_tokens=24)
    assert drafter.num_compared > 2 * (6 + 1 + 9 + stats.tokens)
    assert_partly_accepted(stats)


def test_drafter_that_drafts_nothing_leaves_plain_decoding(llama):
    class Silent(PromptLookupDrafter):
        def draft(self, rows, max_tokens):
            return Candidates.none(rows.num_spanned, rows.device)

    stats = assert_same_as_plain(llama, left_padded([6, 1]), {"assistant_model": Silent()}, max_new_tokens=12)
    assert stats.drafting_rounds == 0 and stats.mean_accepted_length == 0.0 and stats.target_forwards == 12


def test_drafters_show_their_settings(llama):
    assert repr(PromptLookupDrafter(4)) == "PromptLookupDrafter(num_assistant_tokens=4, max_ngram_size=3)"
    assert repr(CausalLMDrafter(llama, 3, 0.5, "heuristic")) == (
        "CausalLMDrafter(LlamaForCausalLM, num_assistant_tokens=3, probability_threshold=0.5, is_heuristic=True, "
        "temperature=1.0)"
    )


@pytest.mark.parametrize("count", [64, 110, 10**6])
def test_more_candidates_than_a_round_can_take_are_refused(llama, count):
    sentence = f"`num_assistant_tokens` has to be at most 63, but is {count}"
    with pytest.raises(ValueError, match=sentence):
        CausalLMDrafter(llama, count)
    with pytest.raises(ValueError, match=sentence):
        PromptLookupDrafter(count)
    assert PromptLookupDrafter(63).num_assistant_tokens == 63
    assert type(PromptLookupDrafter(np.int64(7)).num_assistant_tokens) is int
