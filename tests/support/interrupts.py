"""What a signal handler or the garbage collector may do at any line, done at a chosen one."""

import sys


def interrupt():
    raise KeyboardInterrupt


class AtLine:
    """
    Counts the lines of `files` that the block executes in this thread, and calls `action` before the one of number
    `number`. `lines` are those executed, as (file, line).
    """

    def __init__(self, files, number=None, action=interrupt):
        self.files = set(files)
        self.number = number
        self.action = action
        self.lines = []

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.number:
                sys.settrace(None)
                self.action()
        return self._trace

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)

    @property
    def numbers(self):
        """When each line was executed for the first time."""
        return sorted({line: number for number, line in reversed(list(enumerate(self.lines, start=1)))}.values())
