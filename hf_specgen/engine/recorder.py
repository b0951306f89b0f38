"""RoundRecorder: counts rounds once nothing can take their tokens back."""

from dataclasses import dataclass

from .criteria import is_settled
from .results import RowResult
from .stats import DecodingStats


@dataclass(frozen=True)
class _Entry:
    result: RowResult
    is_prefill: bool
    has_drafted: bool


class RoundRecorder:
    """
    Counts the rounds of rows in the statistics of all and of their requests.

    Args:
        stats ([`DecodingStats`]):
            The counts of all.
        trace (`bool`):
            Whether `stats.traces` keeps every round.
    """

    def __init__(self, stats: DecodingStats, trace: bool):
        self.stats = stats
        self.trace = trace
        self._open: list[_Entry] = []  # rounds whose tokens a stopping criterion may still take back

    def add(self, result: RowResult, is_prefill: bool, has_drafted: bool) -> None:
        """Takes in what a row took from a round."""
        self._open.append(_Entry(result, is_prefill, has_drafted))

    def settle(self) -> None:
        """Counts the rounds that are settled by now."""
        still_open = []
        for entry in self._open:
            result = entry.result
            end = result.start + len(result.token_ids)
            if is_settled(result.request, min(end, len(result.request.token_ids))):
                self._record(entry, min(end, len(result.request.token_ids)) - result.start)
            else:
                still_open.append(entry)
        self._open = still_open

    def _record(self, entry: _Entry, num_tokens: int) -> None:
        result = entry.result
        if num_tokens < 0 or (num_tokens == 0 and result.token_ids):  # all of it was taken back
            return
        for stats in (self.stats, result.request.stats):
            if entry.is_prefill:
                stats.tokens += num_tokens
            else:
                stats.record_round(len(result.proposed), result.num_accepted, num_tokens, entry.has_drafted)
        if self.trace and not entry.is_prefill:
            self.stats.traces.append(result.trace(num_tokens))
