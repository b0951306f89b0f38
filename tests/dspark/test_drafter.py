"""DSpark on our loop: greedy equality, what the drafter knows of each row, and how much it computes."""

import copy
import functools
import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specgen import (
    Decoder,
    DecodingRules,
    DSparkDrafter,
    DSparkModel,
    FrequencyPenalty,
    Request,
    UndecodableMask,
    enable_speculation,
)
from hf_specgen.drafters import ConfidenceThreshold
from hf_specgen.engine.request import PaddedBatch
from hf_specgen.layers.slot_cache import SlotCache
from tests.support.decoding import Fails, make_requests, plain_text, rules, run
from tests.support.dspark_models import HEADS, bigram_target, fitted_drafter
from tests.support.generate_calls import OPTIONS, TOKENIZER, generated
from tests.support.models import (
    EOS,
    PAD,
    VOCAB_SIZE,
    assert_partly_accepted,
    assert_same_as_plain,
    left_padded,
    ragged_lengths,
)

BLOCK = 4


@pytest.fixture(scope="module")
def target():
    return bigram_target()


@pytest.fixture(scope="module")
def speculating(target):
    return enable_speculation(copy.deepcopy(target))


@pytest.fixture(scope="module")
def drafts(target):
    return {head: fitted_drafter(target, head) for head in HEADS}


@pytest.fixture(scope="module")
def draft(drafts):
    return drafts["gated"]


# Greedy equality


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("head", HEADS)
def test_greedy_equals_plain_generate(target, drafts, head, threshold):
    drafting = {"assistant_model": drafts[head], "assistant_confidence_threshold": threshold}
    stats = [
        assert_same_as_plain(target, left_padded(ragged_lengths(rows, rows), rows), drafting, max_new_tokens=24)
        for rows in (1, 4, 8)
    ]
    if threshold == 1.0:  # no confidence is that high
        assert all(run.drafting_rounds > 0 and not run.proposed for run in stats)
    else:
        assert_partly_accepted(*stats)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("head", HEADS)
def test_row_in_a_batch_is_drafted_as_if_alone(target, speculating, drafts, head, threshold):
    batch = left_padded([6, 1, 9, 4, 12, 1, 3, 7])
    settings = {
        "assistant_model": drafts[head],
        "assistant_confidence_threshold": threshold,
        "max_new_tokens": 24,
        "trace": True,
    }
    together = speculating.generate(**batch, **settings)
    traces = speculating.speculation_stats.traces
    for row, mask in enumerate(batch["attention_mask"]):
        alone = speculating.generate(batch["input_ids"][row, mask == 1][None], **settings)[0]
        assert together[row, (mask == 0).sum() :].tolist()[: len(alone)] == alone.tolist()
        assert rounds_of(traces, row) == rounds_of(speculating.speculation_stats.traces, 0)
    assert len({len(rounds_of(traces, row)) for row in range(8)}) > 2, "the rows go the same way"


def rounds_of(traces, row):
    return [(t.proposed, t.num_accepted, t.next_token_id) for t in traces if t.row == row]


@pytest.mark.parametrize(
    ("family", "attention"),
    [("mistral", "sdpa"), ("mistral", "eager"), ("gemma3", "sdpa"), ("gemma3", "eager"), ("qwen3", None)],
)
def test_families_and_windows_shorter_than_the_prompt(family, attention):
    model = bigram_target(family, attn_implementation=attention)
    drafting = {"assistant_model": fitted_drafter(model, "vanilla")}
    stats = [
        assert_same_as_plain(model, left_padded(lengths, seed=len(lengths)), drafting, max_new_tokens=40)
        for lengths in ([12], [12, 5, 12, 9])
    ]
    assert_partly_accepted(*stats)


@pytest.mark.parametrize(
    ("head", "option"), [(head, option) for head, option in zip(HEADS * 2, OPTIONS) if option != "bare"]
)
def test_options_equal_plain_generate(target, drafts, head, option):
    stats, has_effect = [], False
    for seed in range(3):
        batch = left_padded([6, 1, 4], seed=seed)
        settings = OPTIONS[option](generated(target, batch))
        stats.append(
            assert_same_as_plain(target, batch, {"assistant_model": drafts[head]}, max_new_tokens=24, **settings)
        )
        bare = target.generate(**batch, max_new_tokens=24).tolist()
        has_effect |= target.generate(**batch, max_new_tokens=24, **settings).tolist() != bare
    assert has_effect, "the option changes nothing here"
    assert_partly_accepted(*stats)


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_text_longer_than_the_cache_first_is(target, draft, settings):
    settings = {"max_new_tokens": 160, "eos_token_id": [1], **settings}
    stats = assert_same_as_plain(target, left_padded([6, 1, 11]), {"assistant_model": draft}, **settings)
    assert stats.tokens == 3 * 160
    assert_partly_accepted(stats)


def test_drafter_without_tables_of_its_own(target, speculating, draft):
    batch, borrowing = left_padded([6, 1, 4]), copy.deepcopy(draft)
    borrowing.embed_tokens = borrowing.lm_head = None
    traces = []
    for model in (draft, borrowing):
        ids = speculating.generate(**batch, assistant_model=model, max_new_tokens=24, trace=True)
        assert ids.tolist() == target.generate(**batch, max_new_tokens=24).tolist()
        traces.append(speculating.speculation_stats.traces)
    assert traces[0] == traces[1]
    assert_partly_accepted(speculating.speculation_stats)


def test_peers_keep_an_idle_decoder_passing(target, draft):
    own, passes = copy.deepcopy(target), []
    decoder = Decoder(own, DSparkDrafter(draft))
    own.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["output_hidden_states"]), with_kwargs=True
    )
    request, answers = Request([5, 6, 7], 8), iter([True] * 12 + [False])
    for _ in decoder.run([request], lambda is_busy: next(answers)):
        pass
    assert passes == [[0, 1]] * 12, "a dummy pass asks for what the others ask for"
    assert request.token_ids == plain_text(target, request)


def test_bad_words_and_penalties_together(target, draft):
    batch, stats = left_padded([6, 2, 9, 4]), []
    text = generated(target, batch)
    settings = {"bad_words_ids": [[text[2]], text[4:6]], "repetition_penalty": 1.3, "min_new_tokens": 9}
    stats.append(assert_same_as_plain(target, batch, {"assistant_model": draft}, max_new_tokens=24, **settings))
    assert_partly_accepted(*stats)


def test_one_plus_n_layout(target):
    """The same model read from the anchor's slot on, or from the one behind it."""
    anchor_first = fitted_drafter(target, "rnn", block_size=BLOCK + 1)
    one_plus_n = fitted_drafter(target, "rnn", block_size=BLOCK + 1, sample_from_anchor=False)
    one_plus_n.load_state_dict(anchor_first.state_dict())
    assert (anchor_first.config.num_candidates, one_plus_n.config.num_candidates) == (BLOCK + 1, BLOCK)
    anchors = torch.tensor([7])
    with torch.no_grad():
        states = [block_after(model, target, list(range(3, 11)), anchors) for model in (anchor_first, one_plus_n)]
    torch.testing.assert_close(states[1], states[0][:, 1:], atol=0, rtol=0)
    stats = [
        assert_same_as_plain(target, left_padded([6, 1, 4], seed), {"assistant_model": one_plus_n}, max_new_tokens=24)
        for seed in range(3)
    ]
    assert_partly_accepted(*stats)
    assert max(position for run in stats for position in run.proposed) == BLOCK - 1


def tapped(model: DSparkModel, target, ids: list[int]) -> torch.Tensor:
    """What the target's tapped layers say of a text, by a plain pass."""
    states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1] for layer in model.config.target_layer_ids], dim=-1)


def block_after(model: DSparkModel, target, context: list[int], anchors: torch.Tensor) -> torch.Tensor:
    """The block states behind a context that was written at once."""
    cache, span, count = SlotCache(model.config, 1), slice(0, 1), torch.tensor([len(context)])
    write = cache.begin(span, count, len(context), torch.device("cpu"))
    model.write_context(tapped(model, target, context), cache, write.position_ids)
    cache.advance(span, count)
    return model.draft_block(target, cache, span, anchors)


@pytest.mark.parametrize("sizes", [(72, 64), (64, 72)], ids=str)
def test_vocabularies_padded_to_different_sizes(target, sizes):
    wide = copy.deepcopy(target)
    wide.resize_token_embeddings(72, mean_resizing=False)
    with torch.no_grad():
        favourite = wide.lm_head.weight[generated(target, left_padded([6]))[3]]
        wide.lm_head.weight[70] = favourite * 1.01  # an id that only the wider one knows, and often wants
    models = {64: target, 72: wide}
    own, other = models[sizes[0]], fitted_drafter(models[sizes[1]], "vanilla")
    batch = left_padded([6, 2, 8, 5])
    free = assert_same_as_plain(own, batch, {"assistant_model": other}, max_new_tokens=24)
    text = own.generate(**batch, max_new_tokens=24)
    assert (text.max() >= 64) == (sizes[0] == 72)
    mask = {"logits_processor": [UndecodableMask(64, PAD, EOS)]}
    masked = assert_same_as_plain(own, batch, {"assistant_model": other}, max_new_tokens=24, **mask)
    assert_partly_accepted(free, masked)
    sampler = enable_speculation(copy.deepcopy(own))
    torch.manual_seed(0)
    ids = sampler.generate(**batch, assistant_model=other, do_sample=True, max_new_tokens=24, **mask)
    assert ids.max() < 64
    assert_partly_accepted(sampler.speculation_stats)


@pytest.mark.parametrize(
    "types", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")], ids=str
)
def test_types_of_target_and_drafter_may_differ(target, drafts, types):
    """Rounding makes greedy texts differ in the end, but not at their beginning and not the acceptance."""
    own, other = copy.deepcopy(target).to(getattr(torch, types[0])), copy.deepcopy(drafts["rnn"])
    other = other.to(getattr(torch, types[1]))
    assert other.base_logits(torch.zeros(1, 1, 32, dtype=other.dtype)).dtype == torch.float32
    batch = left_padded([6, 2, 8])
    seen = []
    model = enable_speculation(copy.deepcopy(own))
    drafter = DSparkDrafter(other, draft_length=ConfidenceThreshold(0.2))

    def on_round(rows, candidates, verification):
        if candidates.probs is not None:
            seen.append((candidates.probs.dtype, drafter.confidence_logits.dtype))

    for do_sample in (False, True):
        torch.manual_seed(0)
        settings = {"assistant_model": drafter, "max_new_tokens": 24, "do_sample": do_sample}
        ids = model.generate(**batch, on_round=on_round, **settings)
        if not do_sample:
            expected = own.generate(**batch, max_new_tokens=24)
            assert (ids[:, :11] == expected[:, :11]).float().mean() > 0.9
        assert_partly_accepted(model.speculation_stats)
    assert set(seen) == {(torch.float32, torch.float32)}


def test_soft_cap_bounds_the_base_logits_and_not_the_markov_bias(target):
    cap = 0.5
    model = fitted_drafter(target, "vanilla", noise=1.0, final_logit_softcapping=cap)
    states, anchors, corrected = torch.randn(1, BLOCK, 32), torch.tensor([9]), []

    def choose(index, logits):
        corrected.append(logits)
        return logits.argmax(dim=-1)

    with torch.no_grad():
        model.unroll(states, model.base_logits(states), anchors, choose)
        raw = model.lm_head(states)[0, 0]
        bias = model.markov_head.markov_w2(model.markov_head.markov_w1(anchors))[0]
    assert raw.abs().max() > 2 * cap and bias.abs().max() > 2 * cap
    torch.testing.assert_close(corrected[0][0], cap * torch.tanh(raw / cap) + bias)
    capped = assert_same_as_plain(target, left_padded([6, 2, 8]), {"assistant_model": model}, max_new_tokens=24)
    assert_partly_accepted(capped)


def test_reduced_vocabulary_proposes_its_own_ids(target):
    model, corrected = fitted_drafter(target, "vanilla", draft_vocab_size=40), []
    states, anchors = torch.randn(1, 1, 32), torch.tensor([9])

    def choose(index, logits):
        corrected.append(logits[0])
        return logits.argmax(dim=-1)

    with torch.no_grad():
        logits = model.base_logits(states)
        model.unroll(states, logits, anchors, choose)
        expected = logits[0, 0] + model.markov_head.markov_w2(model.markov_head.markov_w1(anchors))[0]
    assert corrected[0].isfinite().tolist() == model.t2d.tolist() and model.t2d.sum() == 40
    torch.testing.assert_close(corrected[0][model.t2d], expected)
    stats = assert_same_as_plain(
        target, left_padded([6, 2, 8, 5]), {"assistant_model": model, "trace": True}, max_new_tokens=24
    )
    proposed = {token_id for trace in stats.traces for token_id in trace.proposed}
    assert len(proposed) > 10 and all(model.t2d[token_id] for token_id in proposed)
    assert_partly_accepted(stats)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_candidates_follow_one_another(drafts, head):
    """Logits and confidence of a candidate depend on the one before it, and in the rnn head on all before it."""
    model, anchors, corrected = drafts[head], torch.tensor([9, 30]), []
    states = torch.randn(2, BLOCK, 32, generator=torch.Generator().manual_seed(0))
    chosen_ids = torch.tensor([[5, 40, 5, 11], [33, 8, 21, 8]])

    def choose(index, logits):
        corrected.append(logits)
        return chosen_ids[:, index]

    confidences = model.unroll(states, model.base_logits(states), anchors, choose)
    previous_ids, memory = torch.cat([anchors[:, None], chosen_ids[:, :-1]], dim=1), None
    for index in range(BLOCK):
        embedding = model.markov_head.markov_w1(previous_ids[:, index])
        bias, memory = model.markov_head.step(embedding, states[:, index], memory)
        torch.testing.assert_close(corrected[index], model.lm_head(states[:, index]) + bias)
        features = torch.cat([states[:, index], embedding], dim=-1)
        torch.testing.assert_close(confidences[:, index], model.confidence_head.proj(features)[:, 0])


# Ends


def test_eos_at_every_place_of_a_round(target, speculating):
    good_draft = fitted_drafter(target, "vanilla", noise=0.1, markov_rank=32)
    places, stats = set(), []
    for seed in range(3):
        batch = left_padded([6, 3], seed=seed)
        text = generated(target, batch, 14)
        for count, eos in enumerate(text):
            if eos in text[:count]:
                continue
            settings = {"eos_token_id": eos, "max_new_tokens": 14}
            expected = target.generate(**batch, **settings)
            ids = speculating.generate(**batch, assistant_model=good_draft, trace=True, **settings)
            assert ids.tolist() == expected.tolist()
            stats.append(speculating.speculation_stats)
            own = [trace for trace in stats[-1].traces if trace.row == 0]
            places.add(place_of_end(own[-1]) if own else "first token")
    assert places >= {"first token", "bonus", "correction", *range(BLOCK)}
    assert_partly_accepted(*stats)


def place_of_end(trace):
    if trace.next_token_id is None:
        return trace.num_accepted - 1  # the slot of the accepted candidate that ended the row
    return "bonus" if trace.num_accepted == len(trace.proposed) == BLOCK else "correction"


def test_stop_string_inside_a_block(target, draft):
    stats, ends = [], set()
    for seed in range(3):
        batch = left_padded([6, 3], seed=seed)
        text = generated(target, batch)
        for start in range(0, 12, 4):
            settings = {"stop_strings": [TOKENIZER.decode(text[start : start + 2])], "tokenizer": TOKENIZER}
            drafting = {"assistant_model": draft, "trace": True}
            stats.append(assert_same_as_plain(target, batch, drafting, max_new_tokens=24, **settings))
            ends |= {trace.next_token_id is None for trace in stats[-1].traces}
    assert ends == {True, False}, "no row ended inside a block"
    assert_partly_accepted(*stats)


def test_every_budget(target, draft):
    batch, stats = left_padded([6, 3, 9]), []
    for budget in range(1, 14):
        stats.append(assert_same_as_plain(target, batch, {"assistant_model": draft}, max_new_tokens=budget))
    assert [run.draft_forwards for run in stats[:3]] == [0, 0, 1], "the last token of the budget needs no candidate"
    assert [run.target_forwards for run in stats[:2]] == [1, 2]
    assert any(sum(run.accepted.values()) for run in stats)
    assert_partly_accepted(*stats)


# What is verified of a block


class Blocks:
    """Records what a drafter drafts: the input of each pass, and the candidates of each block."""

    def __init__(self, monkeypatch):
        self.inputs, self.candidates = [], []
        forward, unroll = DSparkModel.forward, DSparkModel.unroll

        def recording_forward(model, input_ids, *args, **kwargs):
            self.inputs.append(input_ids.clone())
            return forward(model, input_ids, *args, **kwargs)

        def recording_unroll(model, states, base_logits, anchor_ids, choose, has_confidence=True):
            chosen = []

            def recording_choose(index, logits):
                chosen.append(choose(index, logits))
                return chosen[-1]

            confidences = unroll(model, states, base_logits, anchor_ids, recording_choose, has_confidence)
            self.candidates.append(torch.stack(chosen, dim=1))
            return confidences

        monkeypatch.setattr(DSparkModel, "forward", recording_forward)
        monkeypatch.setattr(DSparkModel, "unroll", recording_unroll)


@pytest.mark.parametrize("head", HEADS)
def test_fewer_candidates_are_a_cut_of_the_same_block(target, speculating, drafts, head, monkeypatch):
    batch, firsts = left_padded([6, 1, 9, 4]), {}
    expected = target.generate(**batch, max_new_tokens=16)
    for count in (1, 2, 3, 4):
        with monkeypatch.context() as patch:
            blocks = Blocks(patch)
            settings = {"assistant_model": drafts[head], "num_assistant_tokens": count, "max_new_tokens": 16}
            ids = speculating.generate(**batch, **settings)
        assert ids.tolist() == expected.tolist()
        assert max(speculating.speculation_stats.proposed) == count - 1
        assert {block.shape[1] for block in blocks.inputs} == {BLOCK}, "a block is always drafted whole"
        assert all((block[:, 1:] == drafts[head].config.mask_token_id).all() for block in blocks.inputs)
        firsts[count] = blocks.candidates[0]
        assert_partly_accepted(speculating.speculation_stats)
    for count, first in firsts.items():
        assert first[:, :count].tolist() == firsts[4][:, :count].tolist()


def test_law_is_that_of_the_processed_logits_once(speculating, draft, monkeypatch):
    """What is passed on as the law of a candidate is that of its corrected logits behind those before it."""
    corrected, unroll, num_checked = [], DSparkModel.unroll, 0

    def recording_unroll(model, states, base_logits, anchor_ids, choose, has_confidence=True):
        corrected.clear()

        def recording_choose(index, logits):
            corrected.append(logits.clone())
            return choose(index, logits)

        return unroll(model, states, base_logits, anchor_ids, recording_choose, has_confidence)

    def on_round(rows, candidates, verification):
        nonlocal num_checked
        if candidates.probs is None:
            return
        for row, request in rows.live():
            text = request.committed_from(0)
            for index in range(int(candidates.lengths[row])):
                prefix = torch.tensor(text + candidates.token_ids[row, :index].tolist())
                scores = (corrected[index][row] - 0.5 * prefix.bincount(minlength=VOCAB_SIZE)) / 0.7
                torch.testing.assert_close(candidates.probs[row, index], scores.softmax(dim=-1))
                num_checked += 1

    monkeypatch.setattr(DSparkModel, "unroll", recording_unroll)
    torch.manual_seed(0)
    speculating.generate(
        **left_padded([6, 1, 4]),
        assistant_model=draft,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        logits_processor=[FrequencyPenalty(0.5, pad_token_id=PAD)],
        max_new_tokens=24,
        on_round=on_round,
    )
    assert num_checked > 50
    assert_partly_accepted(speculating.speculation_stats)


def test_more_candidates_than_a_block_gives_are_refused(speculating, draft):
    with pytest.raises(ValueError, match="`num_assistant_tokens` has to be at most 4.*is 5"):
        speculating.generate(
            **left_padded([4]), assistant_model=draft, num_assistant_tokens=BLOCK + 1, max_new_tokens=8
        )


def test_threshold_verifies_up_to_the_first_low_confidence(speculating, drafts):
    drafter = DSparkDrafter(drafts["vanilla"], draft_length=ConfidenceThreshold(0.5))
    lengths = []

    def on_round(rows, candidates, verification):
        if drafter.confidence_logits is None:  # the prefill, or nothing to draft
            return
        for row, request in rows.live():
            room = min(BLOCK, request.num_remaining - 1)
            low = [index for index, logit in enumerate(drafter.confidence_logits[row].tolist()) if logit < 0]
            lengths.append(min([*low, room]))
            assert int(candidates.lengths[row]) == lengths[-1]
        drafter.confidence_logits = None

    speculating.generate(**left_padded([6, 1, 9, 4]), assistant_model=drafter, max_new_tokens=24, on_round=on_round)
    assert {0, 1, 2} <= set(lengths)
    assert_partly_accepted(speculating.speculation_stats)


# Seats


@pytest.mark.parametrize(("head", "threshold"), [("vanilla", None), ("gated", 0.5), ("rnn", 0.5)])
def test_request_in_company_equals_itself_alone(target, drafts, head, threshold):
    policy = None if threshold is None else ConfidenceThreshold(threshold)

    def drafter():
        return DSparkDrafter(drafts[head], draft_length=policy)

    together, alone = make_requests(2), make_requests(2)
    stats = run(target, drafter(), together, slots=3)
    for request in alone:
        run(target, drafter(), [request], slots=1)
    for number, (request, other) in enumerate(zip(together, alone, strict=True)):
        assert (number, request.token_ids) == (number, other.token_ids)
        assert request.finish_reason == other.finish_reason
        has_scope = request.rules.logits_processor and getattr(request.rules.logits_processor[0], "scope", "")
        if not request.rules.do_sample and has_scope != "generated":
            assert (number, request.token_ids) == (number, plain_text(target, request))
    assert {request.rules.do_sample for request in together} == {True, False}
    assert_partly_accepted(stats)


@pytest.mark.parametrize("kind", ["raises", "masks"])
def test_failure_of_a_request_is_its_own(target, draft, kind):
    """A processor that fails at a candidate only ends its row if plain decoding reaches that place."""
    failing = [Request([5, 6, 7 + seed], 20, rules(Fails(length, kind))) for seed, length in enumerate((0, 9, 13))]
    never, others = [Request([8, 9, 10], 9, rules(Fails(12, kind)))], requests_for(4)
    stats = run(target, DSparkDrafter(draft), [*failing, *never, *others], slots=4)
    for request in failing:
        assert request.finish_reason == "error"
        assert ("no luck" if kind == "raises" else "`Fails` masked") in str(request.error)
        bare = plain_text(target, Request(request.prompt_ids, 20))
        assert request.token_ids == bare[: len(request.token_ids)]
    assert [len(request.token_ids) for request in failing] == [0, 6, 10]
    assert never[0].finish_reason == "length"
    for request in (*never, *others):
        assert request.token_ids == plain_text(target, Request(request.prompt_ids, request.max_new_tokens))
    assert_partly_accepted(stats)


def requests_for(count: int = 5) -> list[Request]:
    return [
        Request(random.Random(seed).choices(range(3, VOCAB_SIZE), k=1 + 3 * seed % 10), 16 + seed, rules())
        for seed in range(count)
    ]


@torch.no_grad()
def assert_context_is_whole(decoder: Decoder, target, model: DSparkModel, slots: list[int]) -> None:
    """The context keys and values of some slots are those of the committed tokens but the last, at their places."""
    cache = decoder.rows.draft_cache
    for slot in slots:
        request = decoder.rows.requests[slot]
        text = request.committed_from(0)[:-1]
        assert int(cache.lengths[slot]) == len(text)
        features = model.context_features(tapped(model, target, text))
        rotary = model.rotary_emb(torch.arange(len(text))[None], features.dtype)
        for layer, stored in zip(model.layers, cache.layers):
            keys, values = layer.self_attn.keys_values(features, rotary)
            torch.testing.assert_close(stored.keys[slot, :, : len(text)], keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(stored.values[slot, :, : len(text)], values[0], atol=1e-4, rtol=1e-4)


def test_context_is_that_of_the_committed_tokens(target, draft):
    requests = requests_for(8)
    decoder = Decoder(target, DSparkDrafter(draft), max_batch_size=3)
    for _ in decoder.run(requests):
        placed = [slot for slot, request in enumerate(decoder.rows.requests) if request and request.token_ids]
        assert_context_is_whole(decoder, target, draft, placed)
    assert_partly_accepted(decoder.stats)


class OutOfLuck(Exception):
    """What `failing_once` raises."""


def failing_once(function, call: int):
    """Raises at its `call`-th call, from 0, and then never again."""
    calls = []

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call + 1:
            raise OutOfLuck
        return function(*args, **kwargs)

    return wrapped


def go_on(decoder: Decoder, requests: list[Request], check) -> int:
    """Steps until all is done, through failures; returns their number."""
    decoder.add(*requests)
    num_failures = 0
    while decoder.has_unfinished:
        try:
            decoder.step()
        except OutOfLuck:
            num_failures += 1
            continue
        check()
    return num_failures


@pytest.mark.parametrize("place", ["on_round", "forward", "write_context", "unroll", "target"])
def test_failed_round_is_made_good(target, draft, monkeypatch, place):
    expected = [plain_text(target, request) for request in requests_for()]
    own, stats, num_failures = copy.deepcopy(target), [], 0
    for call in (0, 1, 2, 5):
        with monkeypatch.context() as patch:
            on_round = failing_once(lambda *args: None, call) if place == "on_round" else None
            decoder = Decoder(own, DSparkDrafter(draft), max_batch_size=3, on_round=on_round)
            handle = None
            if place == "target":
                handle = own.lm_head.register_forward_hook(failing_once(lambda *args: None, call))
            elif place != "on_round":
                patch.setattr(DSparkModel, place, failing_once(getattr(DSparkModel, place), call))
            requests = requests_for()

            def check(decoder=decoder):
                behind = decoder._scheduler.prefilling
                slots = [s for s, r in enumerate(decoder.rows.requests) if r and r.token_ids and s not in behind]
                assert_context_is_whole(decoder, target, draft, slots)

            num_failures += go_on(decoder, requests, check)
            if handle is not None:
                handle.remove()
        assert [request.token_ids for request in requests] == expected
        stats.append(decoder.stats)
    assert num_failures == 4
    assert_partly_accepted(*stats)


class FailingProcessor(LogitsProcessor):
    def __init__(self, call: int):
        self.judge = failing_once(lambda scores: scores, call)

    def __call__(self, input_ids, scores):
        return self.judge(scores)


class FailingCriterion(StoppingCriteria):
    def __init__(self, call: int):
        self.judge = failing_once(lambda input_ids: torch.zeros(len(input_ids), dtype=torch.bool), call)

    def __call__(self, input_ids, scores, **kwargs):
        return self.judge(input_ids)


@pytest.mark.parametrize("kind", ["processor", "criterion"])
def test_failure_of_a_shared_processor_or_criterion_is_made_good(target, draft, kind):
    batch, stats, num_failures = left_padded([6, 2, 9]), [], 0
    expected = target.generate(**batch, max_new_tokens=16, eos_token_id=-1)[:, 9:].tolist()
    for call in (0, 2, 3, 5, 9, 14):
        shared = DecodingRules(
            LogitsProcessorList([FailingProcessor(call)] if kind == "processor" else []),
            StoppingCriteriaList([FailingCriterion(call)] if kind == "criterion" else []),
        )
        padded_batch = PaddedBatch(batch["input_ids"], 16)
        requests = [
            Request(ids[mask == 1].tolist(), 16, shared, batch=padded_batch, batch_row=row)
            for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"]))
        ]
        decoder = Decoder(target, DSparkDrafter(draft), max_batch_size=3)
        num_failures += go_on(decoder, requests, lambda: None)
        assert [request.token_ids for request in requests] == expected
        stats.append(decoder.stats)
    assert num_failures >= 2, "in drafting a failure only ends the block"
    assert_partly_accepted(*stats)


# Block states


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_block_states_on_the_cache_equal_those_over_the_whole_context(target, drafts, head, monkeypatch):
    model, compared, forward = drafts[head], [], DSparkModel.forward
    decoder = Decoder(target, DSparkDrafter(model), max_batch_size=3)

    def comparing_forward(this, input_ids, position_ids, attention_mask=None, cache=None, target=None):
        states = forward(
            this, input_ids, position_ids, attention_mask=attention_mask, cache=cache, target=target
        ).last_hidden_state
        for row, request in decoder.rows.live():
            text = request.committed_from(0)
            assert input_ids[row, 0] == text[-1]
            assert position_ids[row].tolist() == list(range(len(text) - 1, len(text) - 1 + BLOCK))
            context = tapped(this, decoder.model, text[:-1])
            expected = forward(
                this, input_ids[row : row + 1], position_ids[row : row + 1], context, torch.arange(len(text) - 1)[None]
            ).last_hidden_state
            compared.append(float((states[row] - expected[0]).abs().max() / expected.abs().max()))
        return type(expected_output)(last_hidden_state=states)

    expected_output = forward(model, torch.tensor([[3]]), torch.tensor([[0]]))
    monkeypatch.setattr(DSparkModel, "forward", comparing_forward)
    for _ in decoder.run(requests_for()):
        pass
    print(f"{len(compared)} blocks, largest relative difference {max(compared):.1e}")
    assert len(compared) > 20 and max(compared) < 1e-5
    assert_partly_accepted(decoder.stats)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_many_anchors_under_a_training_mask_equal_single_blocks(family):
    model = bigram_target(family)
    drafter = fitted_drafter(model, "gated")
    drafter.norm.weight.fill_(1.0)
    ids, anchors = list(range(3, 33)), [1, 4, 5, 17, 29]
    context, num_slots = tapped(drafter, model, ids), BLOCK * len(anchors)
    blocks = torch.zeros(1, num_slots, dtype=torch.long)
    blocks[0, ::BLOCK] = torch.tensor([ids[anchor] for anchor in anchors])
    position_ids = (torch.tensor(anchors)[:, None] + torch.arange(BLOCK)).reshape(1, -1)
    block_of = torch.arange(num_slots) // BLOCK
    sees_context = torch.arange(len(ids)) < torch.tensor(anchors)[block_of][:, None]
    mask = torch.cat([sees_context, block_of[:, None] == block_of], dim=1)[None, None]
    places = torch.arange(len(ids))[None]
    states = drafter(blocks, position_ids, context, places, attention_mask=mask).last_hidden_state
    differences, without_mask = [], []
    for number, anchor in enumerate(anchors):
        slots = slice(number * BLOCK, (number + 1) * BLOCK)
        inputs = blocks[:, slots], position_ids[:, slots]
        single = drafter(*inputs, context[:, :anchor], places[:, :anchor]).last_hidden_state
        differences.append(float((states[:, slots] - single).abs().max()))
        whole = drafter(*inputs, context, places).last_hidden_state
        without_mask.append(float((whole - single).abs().max()))
        cached = block_after(drafter, model, ids[:anchor], blocks[0, slots][:1])
        differences.append(float((cached - single).abs().max()))
    print(f"largest difference {max(differences):.1e}, without a mask {max(without_mask):.1e}")
    assert max(differences) < 1e-5 and max(without_mask) > 0.1


# How much is computed


def test_context_of_a_committed_token_is_computed_once(target, draft, monkeypatch):
    written, write_context = [], DSparkModel.write_context

    def recording(this, target_states, cache, position_ids):
        written.append(position_ids.clone())
        return write_context(this, target_states, cache, position_ids)

    monkeypatch.setattr(DSparkModel, "write_context", recording)
    drafter = DSparkDrafter(draft)
    requests = requests_for(3)
    decoder = Decoder(target, drafter, max_batch_size=3, trace=True)
    starts = []
    for _ in decoder.run(requests):
        starts.append([request.num_committed for request in requests])
    traces = decoder.stats.traces
    fed = sum(len(request.prompt_ids) for request in requests) + sum(1 + len(trace.proposed) for trace in traces)
    assert drafter.num_context_tokens == fed, "the tokens of the target's passes, each once"
    alone = requests_for(1)
    written.clear()
    for _ in Decoder(target, DSparkDrafter(draft), max_batch_size=1).run(alone):
        pass
    stats = run(target, DSparkDrafter(draft), again := requests_for(1), slots=1, trace=True)
    assert again[0].token_ids == alone[0].token_ids
    start, expected = len(alone[0].prompt_ids), [list(range(len(alone[0].prompt_ids)))]
    for trace in stats.traces:
        expected.append(list(range(start, start + 1 + len(trace.proposed))))
        start += trace.num_accepted + 1
    passes = [positions[0].tolist() for positions in written]
    assert passes == expected + expected, "each pass begins behind what is committed"
    assert_partly_accepted(decoder.stats, stats)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_one_pass_of_each_model_per_round(target, draft, monkeypatch, threshold):
    blocks, asked = Blocks(monkeypatch), []
    own = enable_speculation(copy.deepcopy(target))
    batch = left_padded([6, 2, 9])
    own.generate(**batch, assistant_model=draft, max_new_tokens=2)  # the self check of a new target

    def recording(module, args, kwargs, outputs):
        states = outputs.hidden_states
        asked.append((kwargs["output_hidden_states"], kwargs["input_ids"].shape[1], [s is not None for s in states]))

    handle = own.register_forward_hook(recording, with_kwargs=True)
    blocks.inputs.clear()
    own.generate(**batch, assistant_model=draft, max_new_tokens=24, assistant_confidence_threshold=threshold)
    handle.remove()
    stats = own.speculation_stats
    assert stats.target_forwards == len(asked)
    assert stats.draft_forwards == len(blocks.inputs) <= len(asked) - 1, "the prefill drafts nothing"
    assert [wanted for wanted, _, _ in asked] == [[0, 1]] * len(asked), "the layers -1 and 0, nothing else"
    assert {tuple(given) for _, _, given in asked} == {(True, True, False)}
    widths = [width for _, width, _ in asked]
    assert widths[0] == 9 and max(widths[1:]) <= 1 + BLOCK, "the prompt is fed once"
    assert_partly_accepted(stats)


class OnDevice(torch.Tensor):
    """A tensor that stands for one on an accelerator: whatever is computed from it is one too, and waits count."""

    waits: list[str] = []
    waiting = {
        "cpu",
        "tolist",
        "item",
        "numpy",
        "nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__iter__",
    }

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in cls.waiting:
            cls.waits.append(function.__name__)
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("threshold", "num_waits"), [(0.0, 1), (0.5, 2)])
def test_host_waits_at_most_twice_per_round(target, draft, do_sample, threshold, num_waits):
    """What the models compute lies on the device; lengths, counts and random numbers on the host."""
    own, other = copy.deepcopy(target), copy.deepcopy(draft)

    def on_device(module, args, outputs):
        for name, value in outputs.items():
            if isinstance(value, tuple):
                outputs[name] = tuple(v if v is None else v.as_subclass(OnDevice) for v in value)
            elif isinstance(value, torch.Tensor):
                outputs[name] = value.as_subclass(OnDevice)
        return outputs

    requests = [Request([5, 6, 7 + seed] * (seed + 1), 20, rules(do_sample=do_sample), seed=seed) for seed in range(3)]
    policy = ConfidenceThreshold(threshold) if threshold else None
    decoder = Decoder(own, DSparkDrafter(other, draft_length=policy), max_batch_size=3)
    for model in (own, other):
        model.register_forward_hook(on_device)
    decoder.add(*requests)
    decoder.step()
    per_round = []
    while decoder.has_unfinished:
        OnDevice.waits.clear()
        num_drafts = decoder.stats.draft_forwards
        decoder.step()
        if decoder.stats.draft_forwards > num_drafts:
            per_round.append(len(OnDevice.waits))
    assert len(per_round) > 3
    assert set(per_round) == {num_waits}
    assert_partly_accepted(decoder.stats)


def test_sampled_and_greedy_rows_side_by_side(target, draft):
    """A greedy row stays greedy beside rows that sample, and a sampled one keeps its own random numbers."""

    def requests():
        return [Request([5, 6, 7 + seed], 20, rules(do_sample=seed % 2 == 0), seed=seed) for seed in range(6)]

    mixed = requests()
    stats = run(target, DSparkDrafter(draft), mixed, slots=6, trace=True)
    for number, (request, alone) in enumerate(zip(mixed, requests())):
        own = run(target, DSparkDrafter(draft), [alone], slots=1, trace=True)
        assert request.token_ids == alone.token_ids
        assert rounds_of(stats.traces, number) == rounds_of(own.traces, 0)
        if not request.rules.do_sample:
            assert request.token_ids == plain_text(target, request)
    assert len({tuple(request.token_ids[:8]) for request in mixed}) == 6
    assert_partly_accepted(stats)


def test_blocks_that_are_cut_to_nothing_count_as_drafted(drafts, target):
    model = enable_speculation(copy.deepcopy(target))
    settings = {"assistant_model": drafts["vanilla"], "max_new_tokens": 24, "do_sample": False}
    model.generate(**left_padded([6]), assistant_confidence_threshold=1.0, **settings)
    stats = model.speculation_stats
    assert stats.drafting_rounds == stats.draft_forwards > 10 and stats.mean_accepted_length == 1.0
