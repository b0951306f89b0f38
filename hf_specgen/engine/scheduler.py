"""Seating: who waits, who takes a seat next, and whose prompt goes into the cache with which pass.

A prompt is prefilled in chunks, so that a long one does not hold up the rows that are being decoded; what it shares
with a row that is already there is copied instead. Knows requests and caches, no model.
"""

from collections import deque
from dataclasses import dataclass, fields

from ..arguments import check_count
from .batch import Rows
from .request import Request

MIN_SHARED = 16  # tokens from which a common beginning is copied rather than computed again
SHORT_PROMPT = 64  # tokens up to which prompts go together however different their lengths are
CANDIDATE_COLUMNS = 64  # behind prompt and budget: where candidates and padding go


@dataclass(frozen=True)
class CacheLimits:
    """
    How much may be in the cache, and how much goes in at once.

    Args:
        capacity (`int`, *optional*):
            A fixed number of columns per seat, for static shapes. By default the cache grows.
        max_tokens_in_cache (`int`, *optional*):
            The most columns of the target's cache over all seats together, 64 per seat for candidates included;
            requests wait until there is room. The drafter's cache, where it has one, is as long.
        prefill_chunk_size (`int`, *optional*, defaults to 512):
            The most tokens of a prompt that one pass takes in while other rows are being decoded.

    Raises:
        `ValueError` or `TypeError`: if a number is not an int of at least 1.
    """

    capacity: int | None = None
    max_tokens_in_cache: int | None = None
    prefill_chunk_size: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None or field.name == "prefill_chunk_size":
                check_count(field.name, value)

    @property
    def num_columns(self) -> int | None:
        """Columns of a cache of fixed size, None if it grows."""
        return None if self.capacity is None else self.capacity + CANDIDATE_COLUMNS


NO_LIMITS = CacheLimits()


@dataclass(frozen=True)
class PrefillPass:
    """Tokens that go into the cache next: of the seats in `span`, the last of their prompts if `is_last`."""

    span: slice
    token_lists: list[list[int]]
    is_last: bool


class Seating:
    """
    The queue in front of [`Rows`].

    Args:
        rows ([`Rows`]):
            The seats.
        limits ([`CacheLimits`]):
            How much fits.

    Attributes:
        waiting (`deque[Request]`): who has no seat yet.
        joining (`dict[int, Request]`): seats whose prompts are not wholly in the cache; `Rows` counts them as empty.
    """

    def __init__(self, rows: Rows, limits: CacheLimits):
        self.rows = rows
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.joining: dict[int, Request] = {}
        self._num_prefilled = 0  # tokens since the last round of the rows that are being decoded

    @property
    def seated(self) -> list[Request]:
        """Everyone with a seat."""
        return [*(request for request in self.rows.requests if request is not None), *self.joining.values()]

    def check_room(self, request: Request) -> None:
        """Raises `ValueError` if a request would not fit if it were alone."""
        capacity, most = self.limits.capacity, self.limits.max_tokens_in_cache
        needed = len(request.prompt_ids) + request.max_new_tokens
        if capacity is not None and needed > capacity:
            raise ValueError(
                f"Prompt and budget come to {needed} tokens, but the cache has a `capacity` of {capacity} columns."
            )
        if most is not None and _columns_for(request) > most:
            raise ValueError(
                f"Prompt, budget and candidates need {_columns_for(request)} columns, but `max_tokens_in_cache` is "
                f"{most}."
            )

    def admit(self) -> None:
        """Gives free seats to those who wait, in their order, as long as the cache has room for them."""
        if not self.seated and self.limits.max_tokens_in_cache is not None:
            for cache in self.rows.caches():  # a long request may need columns that many rows have now
                cache.release()
        while self.waiting:
            seat = self._free_seat()
            if seat is None or not self._has_room(seat, self.waiting[0]):
                return
            request = self.waiting.popleft()
            request.start(self.rows.device)
            self.joining[seat] = request
            for cache in self.rows.caches():  # they must not give columns away that this row will need
                cache.num_allocated_rows = max(cache.num_allocated_rows, seat + 1)
                cache.prompt_lengths[seat] = len(request.prompt_ids)

    def _free_seat(self) -> int | None:
        seats = (seat for seat, request in enumerate(self.rows.requests) if request is None)
        return next((seat for seat in seats if seat not in self.joining), None)

    def _has_room(self, seat: int, request: Request) -> bool:
        most = self.limits.max_tokens_in_cache
        if most is None:
            return True
        cache = self.rows.cache
        columns = max(cache.num_columns, *(_columns_for(other) for other in [*self.seated, request]))
        return max(cache.num_allocated_rows, seat + 1) * columns <= most

    def is_prefill_next(self) -> bool:
        """Whether newcomers are next. Rows that are being decoded wait for a chunk's worth of tokens, then go on."""
        is_decoding = any(self.rows.requests)
        if self.joining and (not is_decoding or self._num_prefilled < self.limits.prefill_chunk_size):
            return True
        self._num_prefilled = 0
        return False

    def next_pass(self) -> PrefillPass:
        """
        The pass that brings the first joining seats on: neighbours that lack about as much go together. Seats that
        share a beginning with one of them wait for it and copy.
        """
        chunk = (
            self.limits.prefill_chunk_size
            if any(self.rows.requests)
            else max(map(_columns_for, self.joining.values()))
        )
        missing = {seat: self._missing(seat) for seat in self.joining.keys() - self.share()}
        longest = next(seat for seat in self.joining if seat in missing)  # who has waited longest
        seats = self._neighbours(longest, missing, chunk)
        tokens = [missing[seat][:chunk] for seat in seats]
        self._num_prefilled += len(tokens) * max(map(len, tokens))
        return PrefillPass(slice(seats.start, seats.stop), tokens, len(missing[longest]) <= chunk)

    def _missing(self, seat: int) -> list[int]:
        return self.joining[seat].committed_from(int(self.rows.cache.lengths[seat]))

    def _neighbours(self, seat: int, missing: dict[int, list[int]], chunk: int) -> range:
        """The run of seats around one that lack about as much, with padding within the columns that they may use."""
        is_last, lengths = len(missing[seat]) <= chunk, self.rows.cache.lengths.tolist()
        low = high = min(len(missing[seat]), chunk)
        start, columns = lengths[seat], _columns_for(self.joining[seat])
        ends = []
        for step in (-1, 1):
            other = seat + step
            while other in missing and (len(missing[other]) <= chunk) == is_last:
                count = min(len(missing[other]), chunk)
                lowest, highest, latest = min(low, count), max(high, count), max(start, lengths[other])
                room = max(columns, _columns_for(self.joining[other]))
                if highest > max(2 * lowest, SHORT_PROMPT) or latest + highest > room:
                    break
                low, high, start, columns = lowest, highest, latest, room
                other += step
            ends.append(other)
        return range(ends[0] + 1, ends[1])

    def share(self) -> set[int]:
        """
        Copies what joining seats share with a row in the cache. Returns the seats that have to wait for another one
        instead, which joined before them and shares more.
        """
        relatives: dict[tuple[int, ...], list[int]] = {}  # seats by how their prompts begin
        for seat, request in enumerate(self.rows.requests):
            if request is not None:
                relatives.setdefault(tuple(request.prompt_ids[:MIN_SHARED]), []).append(seat)
        waiting = set()
        for seat, request in self.joining.items():
            others = relatives.setdefault(tuple(request.prompt_ids[:MIN_SHARED]), [])
            is_new = int(self.rows.cache.lengths[seat]) == 0 and len(request.prompt_ids) > MIN_SHARED
            if is_new and others and self._copy_shared(seat, others):
                waiting.add(seat)
            others.append(seat)
        return waiting

    def _copy_shared(self, seat: int, others: list[int]) -> bool:
        """Copies from the one of `others` that shares most, or tells whether to wait for it."""
        request = self.joining[seat]
        shared = {other: _num_shared(request, self._at(other)) for other in others}
        best = max(others, key=lambda other: (shared[other], other not in self.joining))
        wanted = min(shared[best], len(request.prompt_ids) - 1)
        count = min(int(self.rows.cache.lengths[best]), wanted)
        if count < wanted and best in self.joining:
            return True
        for cache in self.rows.caches():  # a drafter's may lag behind
            cache.copy_row(best, seat, min(count, int(cache.lengths[best])))
        return False

    def _at(self, seat: int) -> Request:
        request = self.joining.get(seat) or self.rows.requests[seat]
        assert request is not None, "an empty seat has no relatives"
        return request

    def seat(self, span: slice) -> None:
        """Hands joining seats over to `Rows`, for the pass that completes their prompts."""
        for seat in range(span.start, span.stop):
            self.rows.requests[seat] = self.joining.pop(seat)

    def unseat(self, seat: int) -> None:
        """Takes a request whose tokens are not all in the cache back among those that join."""
        request = self.rows.requests[seat]
        assert request is not None, "an empty seat has no request to take back"
        self.rows.requests[seat] = None
        self.joining[seat] = request

    def remove(self, request: Request) -> bool:
        """Takes a request out wherever it is; whether it was there."""
        if request in self.waiting:
            self.waiting.remove(request)
            return True
        for seat, other in [*self.joining.items(), *enumerate(self.rows.requests)]:
            if other is request:
                self.joining.pop(seat, None)
                self.rows.leave(seat)
                return True
        return False


def _columns_for(request: Request) -> int:
    return len(request.prompt_ids) + request.max_new_tokens + CANDIDATE_COLUMNS


def _num_shared(request: Request, other: Request) -> int:
    """How many tokens two prompts begin with in common."""
    pairs = enumerate(zip(request.prompt_ids, other.prompt_ids))
    return next((i for i, (a, b) in pairs if a != b), min(len(request.prompt_ids), len(other.prompt_ids)))
