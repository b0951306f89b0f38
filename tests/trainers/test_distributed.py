"""
Evaluation by generation on 1, 2 and 3 gloo ranks, whole and sharded. `eval_ranks.py` is what each rank does.

A hang ends at the generous limit of `torchrun`.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.eval_ranks import CASES
from tests.support.launching import finished, read_ranks, torchrun
from tests.support.training import PROMPTS

SCRIPT = str(Path(__file__).parents[1] / "support" / "eval_ranks.py")
SHARDED = ["fsdp1", "fsdp1_flat", "fsdp2"]
pytestmark = pytest.mark.distributed


WITH_TWO = ["splitting", "whole", "train_ddp", "train_fsdp2", "broken_pass"]


def run(tmp_path_factory, num_ranks: int, *cases: str) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(num_ranks, SCRIPT, str(folder), *cases)
    return read_ranks(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process needs no start of torchrun."""
    folder = tmp_path_factory.mktemp("one")
    return [{case: json.loads(json.dumps(CASES[case](folder))) for case in ("splitting", "whole")}]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two ranks that end in an error inside a pass, with the folder of what they wrote before."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, finished(2, SCRIPT, str(folder), *WITH_TWO)


@pytest.fixture(scope="module")
def two(ended):
    folder, done = ended
    ranks = read_ranks(folder)
    assert [list(rank) for rank in ranks] == [WITH_TWO[:-1]] * 2, done.stderr[-4000:]
    return ranks


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    cases = ["splitting", "whole", *SHARDED] + (["fsdp2_lora"] if find_spec("peft") else [])
    return run(tmp_path_factory, 3, *cases)


@pytest.fixture(scope="module")
def zero3(tmp_path_factory):
    pytest.importorskip("deepspeed")
    return run(tmp_path_factory, 3, "zero3", "train_zero3")


@pytest.fixture
def sharded(request):
    """All ranks' results of a way of sharding."""
    return [rank[request.param] for rank in request.getfixturevalue("zero3" if request.param == "zero3" else "three")]


def test_texts_are_complete_in_order_and_do_not_depend_on_the_number_of_ranks(one, two, three):
    (expected,) = [rank["splitting"] for rank in one]
    for ranks in (two, three):
        assert [rank["splitting"] for rank in ranks] == [expected] * len(ranks)
    numbers = {name: [(text["index"], text["sample"]) for text in texts] for name, texts in expected.items()}
    assert numbers["seven"] == [(index, 0) for index in range(7)]
    assert numbers["one"] == [(0, 0)]
    assert numbers["samples"] == [(index, sample) for index in range(7) for sample in range(2)]
    assert numbers["one prompt's samples"] == [(0, 0), (0, 1)]
    assert len({text["text"] for text in expected["samples"]}) > len(PROMPTS), "all samples are alike"


def assert_raised_on_all(errors):
    """The error of the second rank, as each rank has raised it."""
    assert errors.pop(1) == "LookupError: the draft is gone"
    assert all("Rank 1 failed" in error and "the draft is gone" in error for error in errors)


def test_errors_on_one_rank_are_known_on_all(one, two, three):
    alone = one[0]["whole"]
    whole = alone["after the errors"]
    assert alone["error"] == "none" and alone["with a failed text"] == whole
    for ranks in (two, three):
        results = [rank["whole"] for rank in ranks]
        assert_raised_on_all([result["error"] for result in results])
        for result in results:
            first, second = result["with a failed text"]
            assert first == whole[0]
            assert second["error"] == "LookupError: the draft is gone" and second["length"] < whole[1]["length"]
            assert result["after the errors"] == whole


@pytest.mark.parametrize("case, kind", [("train_ddp", "whole"), ("train_fsdp2", "fsdp2"), ("train_zero3", "zero3")])
def test_training_is_the_same_and_all_ranks_agree(request, case, kind):
    ranks = request.getfixturevalue("zero3" if kind == "zero3" else "two")
    for result in [rank[case] for rank in ranks]:
        assert result["kinds"] == [kind]
        assert result["losses with"] == result["losses without"]
        assert result["metrics"] == ranks[0][case]["metrics"]
        assert [metrics["eval_rank"] for metrics in result["metrics"]] == [1.0] * 4
        assert result["num_logged"] == 4
        num_samples = 2 if case == "train_ddp" else 1
        assert result["lines"] == [[index, sample] for index in range(7) for sample in range(num_samples)]


@pytest.mark.parametrize("sharded", [*SHARDED, "zero3"], indirect=True)
def test_sharded_model_generates_what_the_whole_one_does(sharded):
    for result in sharded:
        assert [text["text"] for text in result["texts"]] == result["expected"]
        assert result["speculative"] == result["expected"]
        assert len(set(result["expected"])) > 4
        print(f"\nacceptance {result['acceptance_rate']:.2f}")
        assert 0 < result["acceptance_rate"] < 1


@pytest.mark.parametrize("sharded", [*SHARDED, "zero3"], indirect=True)
def test_weights_and_the_training_after_it_are_the_same_to_the_last_bit(sharded):
    for result in sharded:
        assert result["weights are equal"] and result["shards are equal"]
        assert result["losses with"] == result["losses without"]
        assert len(set(result["losses with"])) == 3, "nothing was trained"


@pytest.mark.parametrize("sharded", [*SHARDED, "zero3"], indirect=True)
def test_one_rank_without_prompts_and_one_that_ends_twenty_tokens_early(sharded):
    for result in sharded:
        assert [text["length"] for text in result["unequal"]] == [28, 8]
        assert [text["text"] for text in result["unequal"]] == [text["text"] for text in sharded[0]["unequal"]]
    num_passes = [result["num_passes"] for result in sharded]
    if sharded[0]["is synchronised"]:
        assert num_passes == [28, 28, 28]
    else:  # each at its own pace
        assert num_passes[0] > num_passes[1] > num_passes[2]


@pytest.mark.parametrize("sharded", [*SHARDED, "zero3"], indirect=True)
def test_an_error_on_one_rank_of_a_sharded_model_is_raised_on_all(sharded):
    if sharded[0]["is synchronised"]:
        assert_raised_on_all([result["error"] for result in sharded])
    else:
        assert {result["error"] for result in sharded} == {"none"}, "the text failed alone"
    assert all(result["after the error"] == result["unequal"] for result in sharded)


def test_an_error_inside_a_pass_ends_all_ranks_and_is_named(ended):
    """The process group would wait for half an hour, longer than `finished` does."""
    _, done = ended
    assert done.returncode != 0
    assert "Rank 1 failed inside a pass of a sharded model" in done.stderr
    assert "MemoryError: no room on this rank" in done.stderr


def test_sharded_model_with_adapters(three):
    if "fsdp2_lora" not in three[0]:
        pytest.skip("needs peft")
    for rank in three:
        result = rank["fsdp2_lora"]
        assert result["texts"] == result["expected"] != result["base"]
