import threading

import pytest

from trainers.distribution import on_all_ranks, on_main_rank, split_by_length


def test_split_is_balanced_and_complete():
    lengths = [9, 1, 8, 2, 7, 3, 7]
    shares = split_by_length(lengths, 3)
    assert sorted(index for share in shares for index in share) == list(range(7))
    assert [sum(lengths[index] for index in share) for share in shares] == [12, 11, 14]
    assert all(share == sorted(share) for share in shares)


def test_split_of_fewer_items_than_ranks():
    assert split_by_length([5], 3) == [[0], [], []]
    assert split_by_length([], 2) == [[], []]


def test_equal_items_are_dealt_in_turn():
    assert split_by_length([4] * 5, 2) == [[0, 2, 4], [1, 3]]


def test_results_on_one_process():
    assert on_all_ranks(lambda: {"a": 1}) == [{"a": 1}]
    assert on_main_rank(lambda: "main") == "main"


def test_an_error_keeps_its_type():
    def fail():
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        on_all_ranks(fail)


def test_what_cannot_be_sent_is_an_error_before_anyone_waits():
    with pytest.raises(TypeError, match="pickle"):
        on_all_ranks(threading.Lock)
