import json

import pytest

from hf_specgen import DecodingStats
from hf_specgen.engine.stats import RoundTrace


def counted(*rounds: tuple[int, int, int]) -> DecodingStats:
    stats = DecodingStats()
    for num_proposed, num_accepted, num_emitted in rounds:
        stats.record_round(num_proposed, num_accepted, num_emitted)
    return stats


def counts(stats: DecodingStats) -> tuple[dict, dict, dict]:
    return dict(stats.proposed), dict(stats.judged), dict(stats.accepted)


def test_round_that_keeps_two_of_four():
    stats = counted((4, 2, 3))
    assert (stats.rounds, stats.drafting_rounds, stats.tokens, stats.drafting_tokens) == (1, 1, 3, 3)
    assert counts(stats) == ({0: 1, 1: 1, 2: 1, 3: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1})
    assert stats.acceptance_rate == pytest.approx(2 / 3)  # the fourth was never judged
    assert stats.mean_accepted_length == 3.0


def test_round_that_keeps_all_and_one_that_keeps_none():
    assert counts(counted((2, 2, 3))) == ({0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1})
    assert counts(counted((2, 0, 1))) == ({0: 1, 1: 1}, {0: 1}, {})


def test_round_without_candidates_is_no_drafting_round():
    stats = counted((0, 0, 1))
    assert (stats.rounds, stats.tokens, stats.drafting_rounds, stats.drafting_tokens) == (1, 1, 0, 0)
    assert counts(stats) == ({}, {}, {})


@pytest.mark.parametrize(("num_emitted", "num_judged", "num_accepted"), [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 3)])
def test_cut_round_counts_only_what_became_text(num_emitted, num_judged, num_accepted):
    """Three of five candidates were kept by verification, but the row ended after `num_emitted` tokens."""
    stats = counted((5, 3, num_emitted))
    assert stats.tokens == stats.drafting_tokens == num_emitted
    assert sum(stats.proposed.values()) == 5
    assert sum(stats.judged.values()) == num_judged
    assert sum(stats.accepted.values()) == num_accepted


def test_rates_by_position():
    stats = counted((3, 3, 4), (3, 1, 2), (2, 0, 1), (0, 0, 1), (1, 1, 2))
    assert counts(stats) == ({0: 4, 1: 3, 2: 2}, {0: 4, 1: 2, 2: 1}, {0: 3, 1: 1, 2: 1})
    assert stats.conditional_acceptance == [3 / 4, 1 / 2, 1.0]
    assert stats.survival == [3 / 4, 1 / 3, 1 / 2]
    assert stats.acceptance_rate == 5 / 7
    assert stats.mean_accepted_length == 9 / 4
    stats.target_forwards = 4


def test_rates_of_nothing_are_zero():
    stats = DecodingStats()
    assert stats.mean_accepted_length == stats.acceptance_rate == 0.0
    assert stats.conditional_acceptance == stats.survival == []


def test_sum_counts_both_and_changes_neither():
    first, second = counted((3, 1, 2), (2, 2, 3)), counted((4, 4, 5), (0, 0, 1))
    first.target_forwards, second.target_forwards = 3, 4
    first.draft_forwards, second.draft_forwards = 5, 6
    first.seconds["draft"], second.seconds["draft"], second.seconds["verify"] = 0.5, 0.25, 2.0
    first.traces.append(RoundTrace(0, (7,), 1, 8))
    second.traces.append(RoundTrace(1, (9,), 0, 3))
    total = first + second
    together = counted((3, 1, 2), (2, 2, 3), (4, 4, 5), (0, 0, 1))
    assert counts(total) == counts(together)
    assert (total.rounds, total.tokens, total.drafting_tokens) == (4, 11, 10)
    assert (total.target_forwards, total.draft_forwards) == (7, 11)
    assert (total.seconds["draft"], total.seconds["verify"]) == (0.75, 2.0)
    assert [trace.row for trace in total.traces] == [0, 1]
    assert counts(first) == counts(counted((3, 1, 2), (2, 2, 3))) and len(first.traces) == 1
    assert sum([first, second], DecodingStats()) == total
    with pytest.raises(TypeError):
        first + 1


def test_dictionary_is_json_and_complete():
    stats = counted((3, 1, 2), (2, 2, 3))
    stats.target_forwards, stats.draft_forwards = 3, 6
    stats.seconds["draft"] = 0.5
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["rounds"] == values["drafting_rounds"] == 2
    assert (values["tokens"], values["target_forwards"], values["draft_forwards"]) == (5, 3, 6)
    assert (values["proposed"], values["accepted"]) == ([2, 2, 1], [2, 1, 0])
    assert values["conditional_acceptance"] == [1.0, 0.5]
    assert values["survival"] == [1.0, 0.5, 0.0]
    assert values["seconds"]["draft"] == 0.5
    assert json.loads(json.dumps(DecodingStats().to_dict()))["acceptance_rate"] == 0.0


def test_round_whose_block_was_drafted_and_cut_is_a_drafting_round():
    """A draft model ran, but no candidate was verified: tokens per drafting round must not hide what that cost."""
    stats = DecodingStats()
    stats.record_round(3, 3, 4, has_drafted=True)
    stats.record_round(0, 0, 1, has_drafted=True)
    assert (stats.drafting_rounds, stats.drafting_tokens, stats.mean_accepted_length) == (2, 5, 2.5)
    assert counts(stats) == ({0: 1, 1: 1, 2: 1},) * 3


def test_repr_and_summary_can_be_read():
    stats = counted((4, 2, 3), (4, 4, 5), (0, 0, 1))
    stats.tokens += 1
    stats.target_forwards, stats.draft_forwards = 4, 8
    stats.seconds |= {"draft": 0.0123456, "verify": 0.0370368}
    assert repr(stats) == (
        "DecodingStats(tokens=10, rounds=3, drafting_rounds=2, target_forwards=4, draft_forwards=8, "
        "mean_accepted_length=4.00, acceptance_rate=0.86, "
        "seconds={'draft': 0.012, 'verify': 0.037, 'processors': 0.0, 'other': 0.0})"
    )
    assert stats.summary() == (
        "10 tokens in 4 passes: 6 of 7 judged candidates kept (86%), 4.00 tokens per drafting round; "
        "0.0494 s, draft 25%, verify 75%."
    )


def test_summary_of_a_request_of_a_plain_run_and_of_nothing():
    assert counted((0, 0, 1), (0, 0, 1)).summary() == "2 tokens in 2 rounds after the prompt."
    assert counted((2, 1, 2)).summary() == (
        "2 tokens in 1 round after the prompt: 1 of 2 judged candidates kept (50%), 2.00 tokens per drafting round."
    )
    assert DecodingStats().summary() == "0 tokens in 0 rounds after the prompt."
