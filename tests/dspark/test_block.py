"""A block's states, and how much is computed for them."""

import copy

import pytest
import torch

from hf_specgen import (
    Decoder,
    DSparkDrafter,
    DSparkModel,
    Request,
    enable_speculation,
)
from hf_specgen.drafters import ConfidenceThreshold
from tests.support.decoding import plain_text, rules, run
from tests.support.dspark_models import HEADS, bigram_target, fitted_drafter
from tests.support.dspark_rounds import Blocks, block_after, requests_for, rounds_of, tapped
from tests.support.models import (
    assert_partly_accepted,
    left_padded,
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
