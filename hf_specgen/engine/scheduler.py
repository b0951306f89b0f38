"""Scheduler: which request gets a slot next, and whose prompt goes into the cache with which pass.

A prompt is prefilled in chunks, so that a long one does not hold up the rows that are being decoded; what it shares
with a row that is already there is copied instead. Knows requests and caches, no model.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from .batch import Rows
from .limits import CacheLimits, columns_for
from .request import Request

MIN_SHARED = 16  # tokens from which a common beginning is copied rather than computed again
SHORT_PROMPT = 64  # tokens up to which prompts go together however different their lengths are


@dataclass(frozen=True)
class PrefillPass:
    """
    Tokens that go into the cache next.

    Args:
        span (`slice`): the slots whose tokens they are.
        token_lists (`list[list[int]]`): the tokens, per slot.
        is_last (`bool`): whether nothing is missing after them.
        is_resumed (`bool`): whether the requests have tokens of their own already. Their last one is not among those
            that are fed, and the round after this pass is one like any other.
    """

    span: slice
    token_lists: list[list[int]]
    is_last: bool
    is_resumed: bool

    @property
    def yields_tokens(self) -> bool:
        """Whether the pass ends in the first token of each request."""
        return self.is_last and not self.is_resumed


class Scheduler:
    """
    The queue in front of [`Rows`].

    Args:
        rows ([`Rows`]):
            The slots.
        limits ([`CacheLimits`]):
            How much fits.

    Attributes:
        waiting (`OrderedDict[int, Request]`): the requests without a slot by their numbers, in their order.
        prefilling (`dict[int, Request]`): by slot the requests whose tokens are not all in the cache yet; for `Rows`
            these slots are empty.
    """

    def __init__(self, rows: Rows, limits: CacheLimits):
        self.rows = rows
        self.limits = limits
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.prefilling: dict[int, Request] = {}
        self._num_prefilled = 0  # tokens since the last round of the rows that are being decoded

    @property
    def active(self) -> list[Request]:
        """All requests that have a slot."""
        return [*(request for request in self.rows.requests if request is not None), *self.prefilling.values()]

    @property
    def any_unfinished(self) -> Request | None:
        """One of the requests that wait or have a slot, None if there is none."""
        return next(iter(self.active or self.waiting.values()), None)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests."""
        for request in requests:
            request.status = "waiting"
            self.waiting[request.number] = request

    def admit(self) -> None:
        """Gives free slots to requests that wait, in their order, as long as the cache has room for them."""
        if not self.active and self.limits.max_tokens_in_cache is not None:
            for cache in self.rows.caches():  # a long request may need columns that many rows have now
                cache.release()
        for slot in self._free_slots():
            if not self.waiting or not self._has_room(slot, next(iter(self.waiting.values()))):
                return
            _, request = self.waiting.popitem(last=False)
            request.start(self.rows.device)
            request.status = "prefilling"
            self.prefilling[slot] = request
            for cache in self.rows.caches():  # they must not give columns away that this row will need
                cache.num_allocated_rows = max(cache.num_allocated_rows, slot + 1)
                cache.prompt_lengths[slot] = len(request.prompt_ids)

    def _free_slots(self) -> list[int]:
        free = (slot for slot, request in enumerate(self.rows.requests) if request is None)
        return [slot for slot in free if slot not in self.prefilling]

    def _has_room(self, slot: int, request: Request) -> bool:
        most = self.limits.max_tokens_in_cache
        if most is None:
            return True
        cache = self.rows.cache
        columns = max(cache.num_columns, *(columns_for(other) for other in [*self.active, request]))
        return max(cache.num_allocated_rows, slot + 1) * columns <= most

    def is_prefill_next(self) -> bool:
        """Whether a prefill pass is next. Rows that are being decoded wait for a chunk's worth of tokens at most."""
        is_decoding = any(self.rows.requests)
        if self.prefilling and (not is_decoding or self._num_prefilled < self.limits.prefill_chunk_size):
            return True
        self._num_prefilled = 0
        return False

    def next_pass(self) -> PrefillPass:
        """
        The next prefill pass: over the slot that has waited longest, with adjacent slots of similar remaining length.
        Slots that share a beginning with one of these wait for it and copy.
        """
        chunk = (
            self.limits.prefill_chunk_size
            if any(self.rows.requests)
            else max(map(columns_for, self.prefilling.values()))
        )
        missing = {slot: self._missing(slot) for slot in self.prefilling.keys() - self.share()}
        first = next(slot for slot in self.prefilling if slot in missing)  # has waited longest
        slots = self._neighbours(first, missing, chunk)
        tokens = [missing[slot][:chunk] for slot in slots]
        self._num_prefilled += len(tokens) * max(map(len, tokens))
        is_last, is_resumed = len(missing[first]) <= chunk, bool(self.prefilling[first].token_ids)
        return PrefillPass(slice(slots.start, slots.stop), tokens, is_last, is_resumed)

    def _missing(self, slot: int) -> list[int]:
        """What a slot's cache lacks for the next round: a request that has tokens goes on from its last one."""
        request = self.prefilling[slot]
        tokens = request.committed_from(int(self.rows.cache.lengths[slot]))
        return tokens[:-1] if request.token_ids else tokens

    def _neighbours(self, slot: int, missing: dict[int, list[int]], chunk: int) -> range:
        """The run of slots around one that lack about as much, with padding within the columns that they may use."""

        def kind(index: int) -> tuple[bool, bool]:
            return len(missing[index]) <= chunk, bool(self.prefilling[index].token_ids)

        lengths = self.rows.cache.lengths.tolist()
        low = high = min(len(missing[slot]), chunk)
        start, columns = lengths[slot], columns_for(self.prefilling[slot])
        ends = []
        for step in (-1, 1):
            other = slot + step
            while other in missing and kind(other) == kind(slot):
                count = min(len(missing[other]), chunk)
                lowest, highest, latest = min(low, count), max(high, count), max(start, lengths[other])
                room = max(columns, columns_for(self.prefilling[other]))
                if highest > max(2 * lowest, SHORT_PROMPT) or latest + highest > room:
                    break
                low, high, start, columns = lowest, highest, latest, room
                other += step
            ends.append(other)
        return range(ends[0] + 1, ends[1])

    def share(self) -> set[int]:
        """
        Copies what slots in prefill share with a row in the cache. Returns those that have to wait for another one
        instead, which came before them and shares more.
        """
        relatives: dict[tuple[int, ...], list[int]] = {}  # slots by how their prompts begin
        for slot, request in enumerate(self.rows.requests):
            if request is not None:
                relatives.setdefault(tuple(request.prompt_ids[:MIN_SHARED]), []).append(slot)
        waiting = set()
        for slot, request in self.prefilling.items():
            others = relatives.setdefault(tuple(request.prompt_ids[:MIN_SHARED]), [])
            is_new = int(self.rows.cache.lengths[slot]) == 0 and len(request.prompt_ids) > MIN_SHARED
            if is_new and others and self._copy_shared(slot, others):
                waiting.add(slot)
            others.append(slot)
        return waiting

    def _copy_shared(self, slot: int, others: list[int]) -> bool:
        """Copies from the one of `others` that shares most, or tells whether to wait for it."""
        request = self.prefilling[slot]
        shared = {other: _num_shared(request, self._at(other)) for other in others}
        best = max(others, key=lambda other: (shared[other], other not in self.prefilling))
        wanted = min(shared[best], len(request.prompt_ids) - 1)
        count = min(int(self.rows.cache.lengths[best]), wanted)
        if count < wanted and best in self.prefilling:
            return True
        for cache in self.rows.caches():  # a drafter's may lag behind
            cache.copy_row(best, slot, min(count, int(cache.lengths[best])))
        return False

    def _at(self, slot: int) -> Request:
        request = self.prefilling.get(slot) or self.rows.requests[slot]
        assert request is not None, "an empty slot has no relatives"
        return request

    def start_decoding(self, span: slice) -> None:
        """Hands slots over to `Rows`: for the pass that ends in their first tokens, or after the last one."""
        for slot in range(span.start, span.stop):
            request = self.rows.requests[slot] = self.prefilling.pop(slot)
            request.status = "decoding"

    def recover(self, slot: int) -> None:
        """After a pass that failed: a request that cannot go on from what the caches hold is prefilled again."""
        request = self.rows.requests[slot]
        if request is None:
            return
        if not request.token_ids or int(self.rows.cache.lengths[slot]) < request.num_committed - 1:
            self.rows.requests[slot] = None
            request.status = "prefilling"
            self.prefilling[slot] = request

    def remove(self, request: Request) -> bool:
        """Takes a request out wherever it is; returns whether it was there."""
        if self.waiting.get(request.number) is request:
            del self.waiting[request.number]
            return True
        for slot, other in [*self.prefilling.items(), *enumerate(self.rows.requests)]:
            if other is request:
                self.prefilling.pop(slot, None)
                self.rows.leave(slot)
                return True
        return False


def _num_shared(request: Request, other: Request) -> int:
    """How many tokens two prompts begin with in common."""
    pairs = enumerate(zip(request.prompt_ids, other.prompt_ids))
    return next((i for i, (a, b) in pairs if a != b), min(len(request.prompt_ids), len(other.prompt_ids)))
