"""
Two ranks under `synced_gpus`, as sharded models need it: every rank passes as often as the slowest, and a finished
rank's ids stay frozen. The same file is what torchrun starts:

    python -m torch.distributed.run --nproc-per-node 2 tests/generation/test_synced_gpus.py OUTPUT_FOLDER
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specgen import enable_speculation
from tests.support.launching import read_ranks, torchrun
from tests.support.models import cycle_model

RING = 40
EOS = RING - 1
WRONG = (10, 17, 24)  # letters after which the draft is wrong
# Per case, what a rank starts from and its budget. By eos: 4 tokens on one rank, 28 on the other.
CASES = {
    "eos": [{"letter": EOS - 4, "max_new_tokens": 32}, {"letter": EOS - 28, "max_new_tokens": 32}],
    "length": [{"letter": 1, "max_new_tokens": 5}, {"letter": 3, "max_new_tokens": 25}],
}
LENGTHS = {"eos": [4, 28], "length": [5, 25]}


def ring(wrong=()):
    permutation = [(letter + 1) % RING for letter in range(RING)]
    for letter in wrong:  # skips a letter, and the one before it takes the skipped place
        permutation[letter], permutation[letter - 1] = permutation[letter - 1], permutation[letter]
    return cycle_model(permutation)


class PassCount:
    def __init__(self, model):
        self.count = 0
        model.register_forward_pre_hook(self.add)

    def add(self, *args):
        self.count += 1


def settings_of(case: str, rank: int) -> dict:
    start = CASES[case][rank]
    return {
        "inputs": torch.tensor([[start["letter"]]]),
        "max_new_tokens": start["max_new_tokens"],
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }


def run_case(case: str, rank: int) -> dict:
    plain, speculating, draft = ring(), enable_speculation(ring()), ring(WRONG)
    drafting = {"assistant_model": draft, "num_assistant_tokens": 4}
    settings = settings_of(case, rank)
    speculating.generate(**settings, **drafting)  # for the self-check, which has passes of its own
    passes = PassCount(speculating)
    actual = speculating.generate(**settings, **drafting, synced_gpus=True)
    stats = speculating.speculation_stats
    return {
        "plain": plain.generate(**settings)[0].tolist(),
        "speculative": actual[0].tolist(),
        "num_passes": passes.count,
        "num_own_passes": stats.target_forwards,
        "num_accepted": sum(stats.accepted.values()),
        "num_judged": sum(stats.judged.values()),
        "tokens": stats.tokens,
    }


class FailsOnSecondRank(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if distributed.get_rank() == 1 and input_ids.shape[1] > 6:
            raise RuntimeError("this processor fails")
        return scores


# What the second rank gives besides, by when it is found out.
FAILURES = {
    "settings": {"prefill_chunk_size": 2},
    "inputs": {"attention_mask": torch.zeros(1, 1, dtype=torch.long)},
    "decoding": {},
}


def run_failure(case: str, rank: int) -> list[str]:
    """The error of a rank, with its notes."""
    settings = {"inputs": torch.tensor([[3]]), "max_new_tokens": 25, "prompt_lookup_num_tokens": 3}
    if case == "decoding":
        settings["logits_processor"] = LogitsProcessorList([FailsOnSecondRank()])
    model = enable_speculation(ring())
    try:
        model.generate(**settings, **(FAILURES[case] if rank == 1 else {}), synced_gpus=True)
    except Exception as error:
        notes = vars(error).get("__notes__", [])
        return [type(error).__name__, str(error), *notes]
    return []


def run_rank(folder: Path) -> None:
    """What each rank does; its results go to a file of its own."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    results = {case: run_case(case, rank) for case in CASES}
    results["failures"] = {case: run_failure(case, rank) for case in FAILURES}
    stock = ring().generate(**settings_of("eos", rank), prompt_lookup_num_tokens=3, synced_gpus=True)
    results["stock"] = stock[0].tolist()
    (folder / f"rank_{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(2, __file__, str(folder), limit=120)
    return read_ranks(folder)


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_finished_rank_stays_as_it_is_while_the_other_goes_on(ranks, case):
    for rank, length in enumerate(LENGTHS[case]):
        result = ranks[rank][case]
        assert result["speculative"] == result["plain"]
        assert len(result["speculative"]) == 1 + length
        assert result["tokens"] == length
    num_accepted, num_judged = (sum(rank[case][name] for rank in ranks) for name in ("num_accepted", "num_judged"))
    print(f"\nacceptance {num_accepted / num_judged:.2f}")
    assert 0 < num_accepted < num_judged


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_pass_as_often_as_the_slowest(ranks, case):
    first, second = (rank[case] for rank in ranks)
    assert first["num_own_passes"] < second["num_own_passes"]
    assert first["num_passes"] == second["num_passes"] == second["num_own_passes"]


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "words"), [("settings", "`prefill_chunk_size` (2)"), ("inputs", "Pad on the left")])
def test_rank_that_refuses_its_call_is_named_on_the_others(ranks, case, words):
    first, second = (rank["failures"][case] for rank in ranks)
    assert second[0] == "ValueError" and words in second[1]
    assert first[0] == "RuntimeError" and "rank 1: ValueError" in first[1] and words in first[1]


@pytest.mark.distributed
def test_rank_that_fails_while_decoding_is_named_on_the_others(ranks):
    first, second = (rank["failures"]["decoding"] for rank in ranks)
    assert second[1:] == ["this processor fails", "This is rank 1; the others were told and raise too."]
    assert "decoding failed on rank [1]" in first[1]


@pytest.mark.distributed
def test_stock_transformers_runs_past_the_end_of_a_finished_rank(ranks):
    assert ranks[0]["stock"][:5] == ranks[0]["eos"]["plain"]
    assert len(ranks[0]["stock"]) > 5, "transformers' own loop passes this test"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
