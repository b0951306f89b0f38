"""Traces of the published implementations, reproduced by both entry points. Skipped where they are not at hand."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_specgen import DSparkModel, enable_speculation
from hf_specgen.layers.slot_cache import SlotCache

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the reference traces are not here")
HEADS = ("vanilla", "gated", "rnn")
ALL = [
    "dspark_tiny/dspark_vanilla",
    "dspark_tiny/dspark_gated",
    "dspark_tiny/dspark_rnn",
    "dspark_gemma4/gemma4_k_eq_v",
    "dspark_gemma4/gemma4_plain",
    "other_layouts/speculators_full_vocab",
    "other_layouts/speculators_reduced_vocab",
    "other_layouts/dflash_zlab",
]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "dspark_tiny" / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def enabled(target):
    return enable_speculation(copy.deepcopy(target))


def load(name: str) -> DSparkModel:
    return DSparkModel.from_pretrained(GOLDEN / name)


def traces_of(name: str, file: str) -> list[dict]:
    return json.loads((GOLDEN / name / file).read_text())["traces"]


def rounds_of(trace: dict) -> list[dict]:
    """The reference's rounds, without the one it runs after the last token, with the candidates that have room."""
    last = len(trace["output_ids"]) - 1
    rounds = [copy.copy(entry) for entry in trace["rounds"] if entry["start"] < last]
    for entry in rounds:
        room = last - entry["start"] - 1  # the last token of the budget needs no candidate
        entry["has_room"] = room > 0
        entry["draft_tokens"] = entry["draft_tokens"][:room]
        entry["proposed"] = min(entry["proposed"], room)
        entry["is_cut"] = entry["accepted"] > entry["proposed"]
        entry["accepted"] = min(entry["accepted"], entry["proposed"])
    return rounds


def run(model, draft, expected: dict, **settings):
    prompt = torch.tensor([expected["prompt_ids"]])
    return model.generate(prompt, assistant_model=draft, max_new_tokens=64, do_sample=False, **settings)[0].tolist()


@pytest.mark.parametrize("name", ALL)
def test_checkpoint_loads_whole(name):
    model, info = DSparkModel.from_pretrained(GOLDEN / name, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    has_tables = not name.startswith("other_layouts")
    assert (model.embed_tokens is not None) == has_tables
    assert (model.lm_head is not None) == (has_tables or "reduced" in name)


class Recording:
    """Every block that a drafter drafts: states, corrected logits, confidence logits, chosen ids."""

    def __init__(self, model: DSparkModel, monkeypatch):
        self.blocks: list[dict[str, torch.Tensor]] = []
        forward, unroll = type(model).forward, type(model).unroll

        def recording_forward(this, *args, **kwargs):
            outputs = forward(this, *args, **kwargs)
            self.blocks.append({"block_hidden": outputs.last_hidden_state[0].clone()})
            return outputs

        def recording_unroll(this, states, base_logits, anchor_ids, choose, has_confidence=True):
            logits, ids = [], []

            def recording_choose(index, corrected):
                logits.append(corrected[0].clone())
                ids.append(choose(index, corrected))
                return ids[-1]

            confidences = unroll(this, states, base_logits, anchor_ids, recording_choose, True)
            self.blocks[-1] |= {"draft_logits": torch.stack(logits), "tokens": torch.stack(ids, dim=1)[0]}
            if confidences is not None:
                self.blocks[-1]["confidence_logits"] = confidences[0]
            return confidences

        monkeypatch.setattr(type(model), "forward", recording_forward)
        monkeypatch.setattr(type(model), "unroll", recording_unroll)


def assert_blocks_match(blocks: list[dict], golden: dict[str, torch.Tensor], prompt: int, num_rounds: int) -> None:
    largest = 0.0
    for number in range(min(num_rounds, len(blocks))):
        for key, actual in blocks[number].items():
            expected = golden.get(f"p{prompt}.r{number}.{key}")
            if expected is not None:
                assert actual.shape == expected.shape
                largest = max(largest, float((actual - expected).abs().max()))
    print(f"prompt {prompt}: largest difference {largest:.1e}")
    assert 0 < largest < TOLERANCE


def assert_tokens_match(blocks: list[dict], expected_rounds: list[dict]) -> None:
    drafting = [expected["draft_tokens"] for expected in expected_rounds if expected["has_room"]]
    assert [block["tokens"].tolist() for block in blocks] == drafting


@pytest.mark.parametrize("threshold", [0, 0.5])
@pytest.mark.parametrize("head", HEADS)
def test_dspark_rounds_equal_the_reference(enabled, monkeypatch, head, threshold):
    name = f"dspark_tiny/dspark_{head}"
    draft = load(name)
    golden = load_file(GOLDEN / name / f"trace_threshold_{threshold}.safetensors")
    for number, trace in enumerate(traces_of(name, f"trace_threshold_{threshold}.json")):
        with monkeypatch.context() as patch:
            recording = Recording(draft, patch)
            ids = run(enabled, draft, trace, trace=True, assistant_confidence_threshold=float(threshold))
        assert ids == trace["output_ids"]
        rounds, expected_rounds = enabled.speculation_stats.traces, rounds_of(trace)
        assert len(rounds) == len(expected_rounds)
        assert_blocks_match(recording.blocks, golden, number, num_rounds=6)
        assert_tokens_match(recording.blocks, expected_rounds)
        for ours, expected in zip(rounds, expected_rounds):
            assert list(ours.proposed) == expected["draft_tokens"][: expected["proposed"]]
            assert ours.num_accepted == expected["accepted"]
            assert ours.next_token_id == expected["next_token"] or expected["is_cut"]


@pytest.mark.parametrize("head", HEADS)
def test_stock_entry_point_equals_the_reference(target, monkeypatch, head):
    name = f"dspark_tiny/dspark_{head}"
    draft = load(name)
    golden = load_file(GOLDEN / name / "trace_threshold_0.safetensors")
    for number, trace in enumerate(traces_of(name, "trace_threshold_0.json")):
        with monkeypatch.context() as patch:
            recording = Recording(draft, patch)
            ids = run(target, draft, trace)
        assert ids == trace["output_ids"]
        assert_blocks_match(recording.blocks, golden, number, num_rounds=6)
        assert_tokens_match(recording.blocks, rounds_of(trace))


@pytest.mark.parametrize("threshold", [0, 0.5])
@pytest.mark.parametrize("head", HEADS)
def test_left_padded_batch_equals_the_reference_row_by_row(enabled, head, threshold):
    name = f"dspark_tiny/dspark_{head}"
    traces = traces_of(name, f"trace_threshold_{threshold}.json")
    prompts = [trace["prompt_ids"] for trace in traces]
    longest = max(map(len, prompts))
    pad = enabled.generation_config.pad_token_id or 258
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = enabled.generate(
        ids,
        attention_mask=mask,
        assistant_model=load(name),
        max_new_tokens=64,
        pad_token_id=pad,
        do_sample=False,
        trace=True,
        assistant_confidence_threshold=float(threshold),
    )
    rounds = enabled.speculation_stats.traces
    for row, trace in enumerate(traces):
        assert output[row, longest - len(prompts[row]) :].tolist()[: len(trace["output_ids"])] == trace["output_ids"]
        accepted = [r.num_accepted for r in rounds if r.row == row]
        assert accepted == [expected["accepted"] for expected in rounds_of(trace)]


@pytest.mark.parametrize("variant", ["gemma4_k_eq_v", "gemma4_plain"])
def test_gemma4_rounds_equal_the_reference(variant):
    draft = load(f"dspark_gemma4/{variant}")
    golden = load_file(GOLDEN / "dspark_gemma4" / variant / "rounds.safetensors")
    cache, span = SlotCache(draft.config, num_rows=1), slice(0, 1)
    largest = 0.0
    with torch.no_grad():
        for number in range(3):
            expected = {k.split(".")[1]: v for k, v in golden.items() if k.startswith(f"r{number}.")}
            features = expected["context_features"][None]
            count = torch.tensor([features.shape[1]])
            write = cache.begin(span, count, features.shape[1], features.device)
            draft.write_context(features, cache, write.position_ids)
            cache.advance(span, count)
            assert int(cache.lengths[0]) == int(expected["start"])
            states = draft.draft_block(None, cache, span, expected["anchor"])
            base_logits = draft.base_logits(states)
            logits: list[torch.Tensor] = []

            def choose(index, corrected, logits=logits):
                logits.append(corrected[0])
                return corrected.argmax(dim=-1)

            confidences = draft.unroll(states, base_logits, expected["anchor"], choose)
            actual = {
                "block_hidden": states[0],
                "base_logits": base_logits[0],
                "draft_logits": torch.stack(logits),
                "confidence_logits": confidences[0],
            }
            assert actual["draft_logits"].argmax(dim=-1).tolist() == expected["draft_tokens"].tolist()
            largest = max(largest, *(float((actual[k] - expected[k]).abs().max()) for k in actual))
    print(f"largest difference {largest:.1e}")
    assert largest < TOLERANCE


def test_speculators_with_the_full_vocabulary_equals_the_released_drafter(enabled):
    draft = load("other_layouts/speculators_full_vocab")
    for trace in traces_of("dspark_tiny/dspark_vanilla", "trace_threshold_0.json"):
        assert run(enabled, draft, trace, trace=True) == trace["output_ids"]
        accepted = [r.num_accepted for r in enabled.speculation_stats.traces]
        assert accepted == [expected["accepted"] for expected in rounds_of(trace)]


@pytest.mark.parametrize("do_sample", [False, True])
def test_speculators_with_a_reduced_vocabulary_drafts_about_as_well(enabled, do_sample):
    draft = load("other_layouts/speculators_reduced_vocab")
    reduced = expected = 0.0
    for trace in traces_of("dspark_tiny/dspark_vanilla", "trace_threshold_0.json"):
        ids = run(enabled, draft, trace) if not do_sample else None
        if do_sample:
            prompt = torch.tensor([trace["prompt_ids"]])
            torch.manual_seed(0)
            enabled.generate(prompt, assistant_model=draft, max_new_tokens=64, do_sample=True, top_k=0)
        else:
            assert ids == trace["output_ids"]
        reduced += enabled.speculation_stats.mean_accepted_length / 4
        expected += sum(trace["acceptance_lengths"]) / len(trace["acceptance_lengths"]) / 4
    print(f"tokens per round {reduced:.2f}, with the whole vocabulary, greedy, {expected:.2f}")
    assert reduced > (1.2 if do_sample else expected - 0.15)


@pytest.mark.slow
def test_dflash_of_z_lab_equals_its_trace(enabled, target, monkeypatch):
    name = "other_layouts/dflash_zlab"
    draft = load(name)
    golden = load_file(GOLDEN / name / "trace.safetensors")
    for number, trace in enumerate(traces_of(name, "trace.json")):
        for model in (enabled, target):
            with monkeypatch.context() as patch:
                recording = Recording(draft, patch)
                assert run(model, draft, trace) == trace["output_ids"]
            assert_blocks_match(recording.blocks, golden, number, num_rounds=4)
            for block, expected in zip(recording.blocks[:-1], trace["rounds"]):
                assert block["tokens"].tolist() == expected[: len(block["tokens"])]
