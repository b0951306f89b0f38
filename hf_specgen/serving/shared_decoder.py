"""SharedDecoder: one decoder for many threads. Whoever waits for a job runs the next round, for everyone.

Nothing runs in the background. What became of a request is told to its call; the caller of a round learns nothing of
other calls. Knows jobs and the decoder, but no prompts and no streams.
"""

import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar
from weakref import WeakSet

from torch import nn

from ..arguments import shown
from ..engine.decoder import Decoder
from ..engine.request import FinishReason, Request
from .fair_lock import FairLock
from .job import Call, Job, Piece
from .request_error import CONTEXT_LENGTH_EXCEEDED, refused

T = TypeVar("T")


class SharedDecoder:
    """
    A [`Decoder`] that threads share.

    Ending a job never waits: it is queued, and the thread that holds the lock sees to it within its round. The
    garbage collector may finalise a stream anywhere, also inside a round on the very thread that runs it.

    Args:
        make_decoder (`Callable[[], Decoder]`):
            Makes the decoder, also anew in a forked process, where the rounds of other threads have stopped midway.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, make_decoder: Callable[[], Decoder]):
        self._make_decoder = make_decoder
        self.decoder = make_decoder()
        self._lock = FairLock()
        self._open: dict[Request, tuple[Job, Call]] = {}  # jobs that have not ended
        self._named: dict[str, set[Job]] = {}  # the open ones that have a name
        self._released: deque[Job] = deque()  # to be ended, because nobody waits for them
        self._deadlines: list[tuple[float, int, Job]] = []  # a heap; holds jobs that have ended until they are due
        self._numbers = count()
        self._modules: list[nn.Module] = []  # of the models, looked up when work begins
        self._training: list[nn.Module] = []  # in eval mode for a round
        self._is_stale = False  # after a fork
        _shared_decoders.add(self)

    def submit(self, call: Call, deadline: float | None = None, longest_first: bool = False) -> None:
        """
        Queues the jobs of a call; one that the decoder refuses keeps the error.

        Args:
            call ([`Call`]): the jobs, with their names.
            deadline (`float`, *optional*): when those that have not ended do, by `clock`.
            longest_first (`bool`, *optional*, defaults to `False`): whether those with the largest budgets go first.

        Raises:
            `ValueError`: if a name belongs to a job that has not ended. Then none is queued.
        """
        jobs = sorted(call.jobs, key=lambda job: -job.budget) if longest_first else call.jobs
        self._exclusively(lambda: self._submit(call, jobs, deadline))

    def advance(self, call: Call) -> list[Piece]:
        """Runs rounds until a call has pieces, and returns them; none if all its jobs have ended."""
        while (pieces := self._exclusively(lambda: self._pieces_or_round(call))) is None:
            pass
        return pieces

    def run_pass(self, call: Call) -> None:
        """
        Runs one pass: a round's, or a dummy if all jobs of the call have ended. For a model whose passes happen on
        all ranks or on none; so an exception of the pass is raised here too.
        """
        if error := self._exclusively(lambda: self._round() if call.num_open else self._idle_pass()):
            raise error

    def release(self, jobs: Iterable[Job]) -> None:
        """Ends jobs that have not ended. Never waits, whatever thread calls it from wherever."""
        for job in jobs:
            if not job.is_done and not job.is_released:
                job.is_released = True
                self._released.append(job)
        self._see_to_released()

    def abort(self, name: str) -> bool:
        """Ends the jobs of a name as `release` does, and returns whether there were any."""
        jobs = [job for job in self._named.get(name, set()).copy() if not job.is_done and not job.is_released]
        self.release(jobs)
        return bool(jobs)

    def between_rounds(self, action: Callable[[], T]) -> T:
        """Calls `action` while no round is being run."""
        return self._exclusively(action)

    # Under the lock

    def _exclusively(self, action: Callable[[], T]) -> T:
        """Calls `action` under the lock, and sees to what was released in the meantime."""
        if self._lock.is_inside:
            raise RuntimeError(
                "A backend was asked for text inside one of its own rounds (by a processor, a hook or a finaliser): "
                "it would wait for itself. Only closing streams and `abort` are allowed there."
            )
        try:
            return self._lock.run(lambda: self._tidily(action))
        finally:
            self._see_to_released()

    def _see_to_released(self) -> None:
        """A thread that holds the lock meanwhile comes here afterwards, so nothing is left behind."""
        while self._released and self._lock.try_run(self._tidy_up):
            pass

    def _tidily(self, action: Callable[[], T]) -> T:
        try:
            self._tidy_up()
            return action()
        finally:
            self._tidy_up()

    def _tidy_up(self) -> None:
        if self._is_stale:
            self.decoder = self._make_decoder()
            self._is_stale = False
        while self._released:  # an interrupted job stays the first
            self._end(self._released[0], "aborted")
            self._released.popleft()
        while self._deadlines and (self._deadlines[0][0] <= self.clock() or self._deadlines[0][2].is_done):
            self._end(self._deadlines[0][2], "time")
            heapq.heappop(self._deadlines)
        if not self.decoder.has_unfinished:
            self.decoder.release()

    def _submit(self, call: Call, jobs: list[Job], deadline: float | None) -> None:
        if taken := sorted({job.name for job in jobs if job.name is not None and job.name in self._named}):
            raise ValueError(f"`request_id` {shown(taken[0])} belongs to a request that has not ended.")
        if not self._open:
            self._modules = [module for model in self.decoder.models for module in model.modules()]
        waiting = [(job, job.request) for job in jobs if job.request is not None and not job.is_done]
        for job, request in waiting:
            self._open[request] = job, call
            if job.name is not None:
                self._named.setdefault(job.name, set()).add(job)
        try:
            self.decoder.add(*(request for _, request in waiting))
        except (ValueError, TypeError):  # of some; the others are not concerned
            for job, request in waiting:
                try:
                    self.decoder.add(request)
                except (ValueError, TypeError) as error:  # no room: all else was found out when it was encoded
                    self._end(job, "error", refused(error, code=CONTEXT_LENGTH_EXCEEDED))
        if deadline is not None:
            if len(self._deadlines) > 2 * len(self._open):
                self._deadlines = [entry for entry in self._deadlines if not entry[2].is_done]
                heapq.heapify(self._deadlines)
            for job, _ in waiting:
                heapq.heappush(self._deadlines, (deadline, next(self._numbers), job))

    def _pieces_or_round(self, call: Call) -> list[Piece] | None:
        pieces = call.take_pieces()
        if pieces or not call.num_open:
            return pieces
        self._round()
        return None

    def _round(self) -> Exception | None:
        """
        One round for everyone. If it fails, the jobs whose tokens were in its pass end with the error, and the others
        go on. An interrupt ends these jobs too, and goes on to the thread that ran the round.
        """
        try:
            with self._eval_mode(), self.decoder.fast_attention():
                progressed = self.decoder.step()
            for request in progressed:
                self._note(request)
        except Exception as error:
            self._fail(error)
            return error
        except BaseException:
            self._fail(RuntimeError("Generation was interrupted by another thread's exception."))
            raise
        return None

    def _idle_pass(self) -> None:
        with self._eval_mode():
            self.decoder.idle_pass()

    def _fail(self, error: Exception) -> None:
        concerned = set(self.decoder.in_pass) or set(self._open)
        for request, (job, _) in list(self._open.items()):
            if request in concerned:
                self._end(job, "error", error)
            else:
                self._note(request)

    def _note(self, request: Request) -> None:
        """Tells a call that one of its jobs got tokens or ended."""
        if request not in self._open:
            return
        job, call = self._open[request]
        call.note(job)
        if job.is_done:
            self._forget(job, request)

    def _end(self, job: Job, reason: FinishReason, error: Exception | None = None) -> None:
        """Takes a job out of the decoder, unless it has ended. May be called again if it was interrupted."""
        request = job.request
        if request is None or request not in self._open:
            return
        if request.finish_reason is None:
            self.decoder.abort(request)
            request.finish(reason, error=error)
        self._note(request)

    def _forget(self, job: Job, request: Request) -> None:
        if job.name is not None and job.name in self._named:
            self._named[job.name].discard(job)
            if not self._named[job.name]:
                del self._named[job.name]
        del self._open[request]

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Keeps dropout out of the text, as nobody wants to read it; afterwards the models train on."""
        self._training = [module for module in self._modules if module.training]
        try:
            for module in self._training:
                module.training = False
            yield
        finally:
            self._train_on()

    def _train_on(self) -> None:
        for module in self._training:
            module.training = True
        self._training = []

    def _renew(self) -> None:
        """In a forked process: other threads are gone, with what they held and the rounds that they ran."""
        self._lock = FairLock()
        self._is_stale = True
        self._released.clear()
        for job, call in self._open.values():
            assert job.request is not None, "a job without a request has ended"
            job.request.finish("error", error=RuntimeError("This request belongs to the process that was forked."))
            call.note(job)
        for held in (self._open, self._named, self._deadlines):
            held.clear()
        self._train_on()


_shared_decoders: WeakSet[SharedDecoder] = WeakSet()


def _renew_all() -> None:
    for shared in list(_shared_decoders):
        shared._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
