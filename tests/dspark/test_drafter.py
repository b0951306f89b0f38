"""DSpark on our loop: greedy equality, ends, and what is verified of a block."""

import copy

import pytest
import torch

from hf_specgen import (
    Decoder,
    DSparkDrafter,
    DSparkModel,
    FrequencyPenalty,
    Request,
    UndecodableMask,
    enable_speculation,
)
from hf_specgen.drafters import ConfidenceThreshold
from tests.support.decoding import plain_text
from tests.support.dspark_models import HEADS, bigram_target, fitted_drafter
from tests.support.dspark_rounds import Blocks, block_after, rounds_of
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


@pytest.mark.slow
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
    """What is passed on as the distribution of a candidate is that of its corrected logits behind those before it."""
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
