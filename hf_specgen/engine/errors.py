"""Errors that outlive the pass in which they were raised."""

import inspect
import traceback


def released(error: Exception) -> Exception:
    """The same error, whose traceback no longer holds the variables of its frames: tensors of a whole pass."""
    running = set()
    frame = inspect.currentframe()
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    chain: list[BaseException] = [error]
    for link in chain:
        chain.extend(e for e in (link.__cause__, link.__context__) if e is not None and e not in chain)
        entry = link.__traceback__
        while entry is not None and entry.tb_frame in running:  # these cannot be cleared, and go on
            entry = entry.tb_next
        traceback.clear_frames(entry)
        link.__traceback__ = entry
    return error
