"""One thread at a time, in the order of their coming; an interrupt at any line leaves nothing locked."""

import pytest

from hf_specgen.serving import fair_lock
from hf_specgen.serving.fair_lock import FairLock
from tests.support.interrupts import AtLine
from tests.support.streaming import Threads, is_free

FILES = [fair_lock.__file__]


def test_actions_exclude_each_other():
    lock, found, inside = FairLock(), [], []

    def action():
        inside.append(1)
        found.append(len(inside))
        inside.pop()

    Threads(*[lambda: [lock.run(action) for _ in range(200)]] * 4).join()
    assert found == [1] * 800 and is_free(lock)


def test_thread_that_waits_comes_next():
    """Not when the one that has had the lock is done with all its actions."""
    for _ in range(30):
        lock, order = FairLock(), []

        def first(lock=lock, order=order):
            threads = Threads(lambda: lock.run(lambda: order.append("other")))
            while len(lock._threads) < 2:
                pass
            return threads

        threads = lock.run(first)
        for _ in range(50):
            lock.run(lambda order=order: order.append("own"))
        threads.join()
        assert "other" in order[:4], "a few actions may go before it has come to wait"


def test_lock_that_is_held_is_not_waited_for():
    lock, found = FairLock(), []

    def hold():
        Threads(lambda: found.append(lock.try_run(lambda: found.append("called")))).join()
        assert lock.is_inside and not lock.try_run(lambda: found.append("called"))

    lock.run(hold)
    assert found == [False] and not lock.is_inside
    assert lock.try_run(lambda: found.append("called")) and found == [False, "called"]
    assert is_free(lock)


def test_result_and_exception_of_an_action_are_handed_on():
    lock = FairLock()
    assert lock.run(lambda: 5) == 5
    for call in (lock.run, lock.try_run):
        with pytest.raises(ZeroDivisionError):
            call(lambda: 1 / 0)
        assert is_free(lock)


@pytest.mark.parametrize("name", ["run", "try_run"])
def test_interrupt_at_any_line_leaves_nothing_locked(name):
    call = getattr(FairLock(), name)
    with AtLine(FILES) as traced:
        call(list)
    assert len(traced.lines) > 20
    for number in range(1, len(traced.lines) + 1):
        lock = FairLock()
        with pytest.raises(KeyboardInterrupt), AtLine(FILES, number):
            getattr(lock, name)(list)
        assert is_free(lock), traced.lines[number - 1]
        assert lock.run(lambda: 5) == 5


def test_interrupt_while_waiting_leaves_the_lock_to_the_one_that_has_it():
    lock = FairLock()
    turn = lock._turn

    class Interrupted:
        release = turn.release

        def acquire(self):
            raise KeyboardInterrupt

    def waits():
        with pytest.raises(KeyboardInterrupt):
            lock.run(list)

    def hold():
        lock._turn = Interrupted()
        Threads(waits).join()
        lock._turn = turn
        Threads(lambda: found.append(lock.try_run(list))).join()

    found = []
    lock.run(hold)
    assert found == [False] and is_free(lock)
