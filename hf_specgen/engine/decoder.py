"""Decoder: seats requests and runs rounds. The one decoding loop of this package.

A round: draft; one target pass over the anchor and the candidates; process and verify; commit. Eager decoding,
batches, continuous batching and speculation are settings of it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..arguments import check_count
from ..layers.attention import grouped_attention
from .batch import Rows, forward, forward_last, padded
from .drafter import Drafter, checked_block, hidden_state_indices
from .model_facts import check_ids, check_positions
from .outcome import Outcome, Taken, settle
from .request import Request
from .scheduler import CANDIDATE_COLUMNS, NO_LIMITS, CacheLimits, Seating
from .scoring import score
from .selfcheck import check_window, self_check
from .stats import DecodingStats
from .support import unsupported_reason
from .verification import Candidates, Verification, verify

ROLES = ("target", "draft model")
RoundHook = Callable[[Rows, Candidates, Verification], None]


class Decoder:
    """
    Decodes requests side by side; as one leaves, the next takes its seat.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target: a causal language model.
        drafter ([`Drafter`], *optional*):
            What proposes candidates. By default every round yields one token per row.
        max_batch_size (`int`, *optional*, defaults to 8):
            The number of seats.
        limits ([`CacheLimits`], *optional*):
            How much fits into the cache; by default it grows as needed.
        on_round (`Callable[[Rows, Candidates, Verification], None]`, *optional*):
            Called after every verification, before its tokens are committed.
        trace (`bool`, *optional*, defaults to `False`):
            Whether `stats.traces` keeps every round.

    Attributes:
        stats ([`DecodingStats`]): the counts so far.
        in_pass (`list[Request]`): the requests whose tokens are in the current pass, or were in the last one.

    Raises:
        `ValueError`: if the loop cannot serve the target or the draft model, with the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None = None,
        max_batch_size: int = 8,
        limits: CacheLimits = NO_LIMITS,
        on_round: RoundHook | None = None,
        trace: bool = False,
    ):
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise TypeError(f"`model` has to be a causal language model, but is a {type(model).__name__!r}.")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(
                f"`drafter` has to be a `Drafter`, but is a {type(drafter).__name__!r}. Wrap a draft model in "
                "`CausalLMDrafter`, a `DSparkModel` in `DSparkDrafter`."
            )
        if on_round is not None and not callable(on_round):
            raise TypeError(f"`on_round` has to be callable, but is {on_round!r}.")
        check_count("max_batch_size", max_batch_size)
        if not isinstance(limits, CacheLimits):
            raise TypeError(f"`limits` has to be `CacheLimits`, but is {limits!r}.")
        self.model = model
        self.drafter = drafter
        self.on_round = on_round
        self.trace = trace
        self.stats = DecodingStats()
        self.in_pass: list[Request] = []
        for used, role in zip(self._models, ROLES):
            if reason := unsupported_reason(used):
                raise ValueError(f"The decoding loop cannot serve this {role}: {reason}.")
            self_check(used, role)
        if drafter is not None:
            drafter.bind(model)
        draft_cache = None if drafter is None else drafter.make_cache(max_batch_size)
        self.rows = Rows(model, max_batch_size, limits.num_columns, draft_cache)
        for cache in self.rows.caches():
            cache.max_tokens = limits.max_tokens_in_cache
        self._seating = Seating(self.rows, limits)
        self._numbers = count()
        self._drafted_rows: frozenset[int] = frozenset()  # for which a draft model ran in this round

    @property
    def _models(self) -> list[PreTrainedModel]:
        return [m for m in (self.model, self.drafter and self.drafter.model) if m is not None]

    def add(self, *requests: Request) -> None:
        """
        Queues requests, all or none.

        Raises:
            `ValueError`: if one leaves the positions that the models know or the fixed capacity, names ids outside
                the vocabulary, or was queued before.
        """
        if len({id(request) for request in requests}) < len(requests):
            raise ValueError("A `Request` is given twice in one call.")
        for request in requests:
            if not isinstance(request, Request):
                raise TypeError(f"The decoder takes a `Request`, but got a {type(request).__name__!r}.")
            if request.number >= 0:
                raise ValueError("A `Request` is decoded once; make a new one from its prompt.")
            check_ids(self.model, request)
            self._seating.check_room(request)
        everyone = [*self._seating.seated, *self._seating.waiting, *requests]
        longest = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=0)
        for used, role, cache in zip(self._models, ROLES, self.rows.caches()):
            check_positions(used, everyone, role)
            check_window(used, cache, longest, role)
        for request in requests:
            request.number = next(self._numbers)
        self._seating.waiting.extend(requests)

    def abort(self, request: Request) -> None:
        """Ends a request now, with finish reason `"aborted"`, and frees its seat. Does nothing if it has ended."""
        if self._seating.remove(request):
            request.finish_reason = "aborted"

    def release(self) -> None:
        """Gives the caches' memory back; only when nothing is being decoded."""
        for cache in self.rows.caches():
            cache.release()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or is being decoded."""
        return bool(self._seating.waiting or self._seating.seated)

    def run(
        self, requests: Iterable[Request], has_unfinished_peers: Callable[[bool], bool] | None = None
    ) -> Iterator[list[Request]]:
        """
        Decodes until every request is finished.

        Args:
            requests (`Iterable[Request]`):
                The requests. Those with the largest budgets get seats first, so that few seats stay empty at the end;
                equal ones in the given order.
            has_unfinished_peers (`Callable[[bool], bool]`, *optional*):
                For sharded models, whose forward passes must happen on all ranks: called before every round with
                whether this rank still has work, it answers whether any rank has. A rank without work runs dummy
                passes.

        Yields:
            After each round, the requests that got tokens or finished in it.
        """
        self.add(*requests)
        self._seating.waiting = deque(sorted(self._seating.waiting, key=lambda request: -request.max_new_tokens))
        with self.fast_attention():
            while has_unfinished_peers(self.has_unfinished) if has_unfinished_peers else self.has_unfinished:
                if self.has_unfinished:
                    yield self.step()
                else:
                    self.idle_pass()

    def fast_attention(self) -> AbstractContextManager:
        """Lets the models use grouped attention inside the block, as `run` does; for callers of `step`."""
        return grouped_attention(*self._models)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """
        Runs one pass and returns the requests that got tokens: newcomers' prompts, in turns with a round of the rows
        that are being decoded.
        """
        if not self.has_unfinished:
            return []
        start = time.perf_counter()
        measured = sum(self.stats.seconds.values())
        self.in_pass = []
        self._seating.admit()
        try:
            progressed = self._prefill() if self._seating.is_prefill_next() else self._round()
        except BaseException:
            self._recover()
            raise
        inside = sum(self.stats.seconds.values()) - measured
        self.stats.seconds["other"] += time.perf_counter() - start - inside
        return progressed

    def _recover(self) -> None:
        """After a round that did not end: nothing of it counts, and what was not prefilled is so next."""
        for seat, request in enumerate(self.rows.requests):
            if request is not None:
                self.rows.roll_back(seat)
            if self.drafter is not None and self.drafter.target_layer_ids and self.rows.draft_cache is not None:
                # The states of a pass that was not observed are gone: it has to be run again.
                self.rows.cache.truncate(seat, int(self.rows.draft_cache.lengths[seat]))
            if request is not None and int(self.rows.cache.lengths[seat]) < request.num_committed - 1:
                self._seating.unseat(seat)

    def _prefill(self) -> list[Request]:
        """A round in which nothing is drafted, over newcomers; it yields tokens if it completes their prompts."""
        prefill = self._seating.next_pass()
        self.rows.span = prefill.span
        self.in_pass = [self._seating.joining[seat] for seat in range(prefill.span.start, prefill.span.stop)]
        if prefill.is_last:
            self._seating.seat(prefill.span)
        candidates = Candidates.none(self.rows.num_spanned, self.rows.device)
        token_ids, num_tokens = padded(prefill.token_lists, self.rows.device)
        with self._phase("verify"):
            outputs = forward_last(
                self.model, self.rows.cache, self.rows.span, token_ids, num_tokens, **self._observed_states()
            )
        if prefill.is_last:
            return self._finish_round(candidates, outputs, is_prefill=True)
        self.stats.target_forwards += 1
        self._observe(candidates, outputs)
        return []

    def _round(self) -> list[Request]:
        occupied = [seat for seat, request in enumerate(self.rows.requests) if request is not None]
        self.rows.span = slice(occupied[0], occupied[-1] + 1)
        self.in_pass = [request for _, request in self.rows.live()]
        with self._phase("draft"):
            candidates = self._draft()
        anchors, _ = padded([tokens or [0] for tokens in self.rows.pending(self.rows.cache)], self.rows.device)
        assert anchors.shape[1] == 1, "a cache holds all committed tokens but the last"
        is_live = torch.tensor([request is not None for request in self.rows.spanned])
        with self._phase("verify"):
            outputs = forward(
                self.model,
                self.rows.cache,
                self.rows.span,
                torch.cat([anchors, candidates.token_ids], dim=1),
                (candidates.lengths + 1) * is_live,
                **self._observed_states(),
            )
        return self._finish_round(candidates, outputs, is_prefill=False)

    def _draft(self) -> Candidates:
        if self.drafter is None:
            return Candidates.none(self.rows.num_spanned, self.rows.device)
        free = CANDIDATE_COLUMNS - 1
        if self.rows.cache.capacity is not None:  # a short row's padding must fit behind the longest row
            free = min(free, self.rows.cache.capacity - int(self.rows.cache.lengths[self.rows.span].max()) - 1)
        # The last token of the budget needs no candidate: the target gives it anyway.
        room = [0 if request is None else min(request.num_remaining - 1, free) for request in self.rows.spanned]
        self._drafted_rows = frozenset()
        if max(room) == 0:
            return Candidates.none(self.rows.num_spanned, self.rows.device)
        num_forwards = self.drafter.num_forwards
        candidates = self.drafter.draft(self.rows, torch.tensor(room))
        self.stats.draft_forwards += self.drafter.num_forwards - num_forwards
        if self.drafter.num_forwards > num_forwards:
            self._drafted_rows = frozenset(row for row, tokens in enumerate(room) if tokens > 0)
        return checked_block(self.drafter, candidates, room)

    def _observed_states(self) -> dict[str, list[int]]:
        layer_ids = () if self.drafter is None else self.drafter.target_layer_ids
        return {"output_hidden_states": hidden_state_indices(layer_ids)} if layer_ids else {}

    def _finish_round(self, candidates: Candidates, outputs: ModelOutput, is_prefill: bool) -> list[Request]:
        self.stats.target_forwards += 1
        with self._phase("processors"):
            scores = score(self.rows, outputs.logits, candidates.token_ids, candidates.lengths)
            verification = self._verify(candidates, scores)
            table = torch.cat(
                [
                    candidates.token_ids,
                    verification.next_token_ids[:, None],
                    verification.num_accepted[:, None],
                    verification.num_possible[:, None],
                ],
                dim=1,
            ).tolist()  # the round's one wait for the device
        self._observe(candidates, outputs)
        if is_prefill:
            self._seating.share()
        if self.on_round is not None:
            self.on_round(self.rows, candidates, verification)
        outcomes = []
        for row, request in self.rows.live():
            *proposed, next_token_id, num_accepted, num_possible = table[row]
            proposed = proposed[: int(candidates.lengths[row])]
            outcomes.append(Outcome(row, request, proposed, num_accepted, next_token_id, num_possible))
        for outcome in outcomes:
            outcome.keep_scores(scores, outputs.logits)
        taken = settle(self.rows, outcomes, candidates.token_ids, outputs.logits)
        for outcome, part in zip(outcomes, taken):
            self._commit(outcome, part, is_prefill)
        return [outcome.request for outcome in outcomes]

    def _observe(self, candidates: Candidates, outputs: ModelOutput) -> None:
        if self.drafter is not None:
            with self._phase("draft"):
                self.drafter.observe(self.rows, candidates, outputs)

    def _verify(self, candidates: Candidates, scores: Tensor) -> Verification:
        do_sample = [request is not None and request.rules.do_sample for request in self.rows.spanned]
        if not any(do_sample):
            return verify(candidates, scores, do_sample)
        noise = self.rows.draw_for(candidates.lengths, candidates.token_ids.shape[1])
        return verify(candidates, scores, do_sample, noise.to(scores.device))

    def _commit(self, outcome: Outcome, taken: Taken, is_prefill: bool) -> None:
        request, seat = outcome.request, self.rows.span.start + outcome.row
        self.rows.commit(seat, outcome.decided[: taken.num_tokens])
        request.finish_reason = taken.finish_reason
        for kept in (request.scores, request.logits, request.logprobs):
            del kept[len(request.token_ids) :]
        has_drafted = outcome.row in self._drafted_rows
        for stats in (self.stats, request.stats):
            if is_prefill:
                stats.tokens += taken.num_tokens
            else:
                stats.record_round(len(outcome.proposed), outcome.num_accepted, taken.num_tokens, has_drafted)
        if self.trace and not is_prefill:
            self.stats.traces.append(outcome.trace(taken.num_tokens))
        if taken.finish_reason is not None:
            self.rows.leave(seat)

    def idle_pass(self) -> None:
        """What a rank without work runs so that the others' collectives complete; changes nothing."""
        token_ids = torch.zeros(1, 1, dtype=torch.long, device=self.rows.device)
        with torch.no_grad():
            self.model(input_ids=token_ids, use_cache=False, **self._observed_states())

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stats.seconds[name] += time.perf_counter() - start
