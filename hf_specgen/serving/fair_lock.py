"""FairLock: one thread at a time, those that wait in their order. Knows its threads, and survives an interrupt."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class FairLock:
    """
    Calls functions one at a time. A thread that comes back for the lock goes behind those that wait for it, and an
    exception that is raised anywhere in here, such as `KeyboardInterrupt`, leaves nothing locked.
    """

    def __init__(self) -> None:
        # Reentrant ones, because these can be released without knowing whether they are held.
        self._turn = threading.RLock()  # who holds it gets the lock next
        self._lock = threading.RLock()
        self._threads: set[int] = set()  # that hold the lock or wait for it

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread holds the lock or waits for it, and so must not ask for it."""
        return threading.get_ident() in self._threads

    def run(self, action: Callable[[], T]) -> T:
        """Waits for the lock and calls `action` with it."""
        assert not self.is_inside, "a thread would wait for itself"
        try:
            try:
                self._threads.add(threading.get_ident())
                self._turn.acquire()
                self._lock.acquire()
                self._turn.release()
                return action()
            finally:
                self._leave()
        finally:  # again, where an interrupt ended the first one
            self._leave()

    def try_run(self, action: Callable[[], object]) -> bool:
        """Calls `action` with the lock if it is free, and returns whether it was."""
        if self.is_inside:
            return False
        is_free = False
        try:
            try:
                self._threads.add(threading.get_ident())
                if is_free := self._lock.acquire(blocking=False):
                    action()
            finally:
                self._leave()
        finally:
            self._leave()
        return is_free

    def _leave(self) -> None:
        for lock in (self._turn, self._lock):
            try:
                lock.release()
            except RuntimeError:  # it is not this thread's
                pass
        self._threads.discard(threading.get_ident())
