"""Decoder: the one decoding loop of this package.

A round: draft; one target pass over the anchor and the candidates; process and verify; commit. Eager decoding,
batches, continuous batching and speculation are settings of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..arguments import check_count
from ..layers.attention import grouped_attention
from .batch import Rows, forward, forward_last, padded
from .criteria import apply_criteria
from .drafter import MAX_CANDIDATES, Draft, Drafter, draft_block
from .judging import unknown_processors
from .limits import NO_LIMITS, CacheLimits
from .model_facts import check_ids, check_positions, longest_row
from .noise import verification_noise
from .recorder import RoundRecorder
from .request import Request
from .results import RowResult, round_results
from .scheduler import Scheduler
from .scoring import score
from .selfcheck import check_window, self_check
from .stats import DecodingStats
from .stopping import apply_stops
from .support import unsupported_reason
from .verification import Candidates, Verification, verify

ROLES = ("target", "draft model")
RoundHook = Callable[[Rows, Candidates, Verification], None]


class Decoder:
    """
    Decodes requests side by side; as one leaves, the next takes its slot.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target: a causal language model.
        drafter ([`Drafter`], *optional*):
            What proposes candidates. By default every round yields one token per row.
        max_batch_size (`int`, *optional*, defaults to 8):
            The number of slots.
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
        `ValueError` or `TypeError`: if the loop cannot serve the target or the draft model, with the reason, or an
            argument is of another kind or can never work.
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
        _check_kinds(model, drafter, limits, on_round)
        max_batch_size = check_count("max_batch_size", max_batch_size)
        limits.check_slots(max_batch_size)
        self.model = model
        self.drafter = drafter
        self.on_round = on_round
        self.stats = DecodingStats()
        self.in_pass: list[Request] = []
        for used, role in zip(self.models, ROLES):
            if reason := unsupported_reason(used):
                raise ValueError(f"The decoding loop cannot serve this {role}: {reason}.")
            self_check(used, role)
        if drafter is not None:
            drafter.bind(model)
        draft_cache = None if drafter is None else drafter.make_cache(max_batch_size)
        self.rows = Rows(model, max_batch_size, limits.num_columns, draft_cache)
        for cache in self.rows.caches():
            cache.max_tokens = limits.max_tokens_in_cache
        self._scheduler = Scheduler(self.rows, limits)
        self._recorder = RoundRecorder(self.stats, trace)
        self._numbers = count()

    @property
    def models(self) -> list[PreTrainedModel]:
        """The target, and the draft model if there is one."""
        return [m for m in (self.model, self.drafter and self.drafter.model) if m is not None]

    def add(self, *requests: Request, longest_first: bool = False) -> None:
        """
        Queues requests, all or none.

        Args:
            requests ([`Request`]):
                The requests.
            longest_first (`bool`, *optional*, defaults to `False`):
                Whether those with the largest budgets get slots first, so that few slots are empty at the end; equal
                ones, and by default all, in the given order.

        Raises:
            `ValueError`: if one leaves the positions that the models know or the fixed capacity, names ids outside
                the vocabulary, was queued before, or has a processor whose state cannot be taken back.
            `TypeError`: if one is no [`Request`].
        """
        if len({id(request) for request in requests}) < len(requests):
            raise ValueError("A `Request` is given twice in one call.")
        for request in requests:
            if not isinstance(request, Request):
                raise TypeError(f"The decoder takes a `Request`, but got a {type(request).__name__!r}.")
            if request.status != "new":
                raise ValueError("A `Request` is decoded once; make a new one from its prompt.")
            check_ids(self.model, request)
            self._scheduler.limits.check_room(request)
            if self.drafter is not None or len(request.batch.requests) > 1:  # else each token is judged once, in order
                request.batch.remember(unknown_processors(request.rules))
        # Those that are here went through this check with one another, so any of them stands for all.
        earlier = self._scheduler.any_unfinished
        company = [*requests] if earlier is None else [earlier, *requests]
        longest = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=0)
        for used, role, cache in zip(self.models, ROLES, self.rows.caches()):
            check_positions(used, company, role)
            check_window(used, cache, longest, role)
        for request in requests:
            request.number = next(self._numbers)
        self._scheduler.add(sorted(requests, key=lambda r: -r.max_new_tokens) if longest_first else requests)

    def longest_row(self, prompt_length: int) -> int | None:
        """The most tokens that a prompt of this length and its text can have together, None if nothing bounds them."""
        limits = [self._scheduler.limits.longest_row, *(longest_row(used, prompt_length) for used in self.models)]
        return min((limit for limit in limits if limit is not None), default=None)

    def abort(self, request: Request) -> None:
        """Ends a request now, with finish reason `"aborted"`, and frees its slot. Does nothing if it has ended."""
        if self._scheduler.remove(request):
            request.finish("aborted")

    def release(self) -> None:
        """Gives the caches' memory back; only when nothing is being decoded."""
        for cache in self.rows.caches():
            cache.release()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or is being decoded."""
        return self._scheduler.any_unfinished is not None

    def run(
        self, requests: Iterable[Request], has_unfinished_peers: Callable[[bool], bool] | None = None
    ) -> Iterator[list[Request]]:
        """
        Decodes until every request is finished.

        Args:
            requests (`Iterable[Request]`):
                The requests; those with the largest budgets get slots first.
            has_unfinished_peers (`Callable[[bool], bool]`, *optional*):
                For sharded models, whose forward passes must happen on all ranks: called before every round with
                whether this rank still has work, it answers whether any rank has. A rank without work runs dummy
                passes.

        Yields:
            After each round, the requests that got tokens or finished in it.
        """
        self.add(*requests, longest_first=True)
        with self.fast_attention():
            while has_unfinished_peers(self.has_unfinished) if has_unfinished_peers else self.has_unfinished:
                if self.has_unfinished:
                    yield self.step()
                else:
                    self.idle_pass()

    def fast_attention(self) -> AbstractContextManager:
        """Lets the models use grouped attention inside the block, as `run` does; for callers of `step`."""
        return grouped_attention(*self.models)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """
        Runs one pass and returns the requests that got tokens: a prefill pass over new prompts, in turns with a round
        of the rows that are being decoded.
        """
        if not self.has_unfinished:
            return []
        start = time.perf_counter()
        measured = sum(self.stats.seconds.values())
        self.in_pass = []
        self._scheduler.admit()
        try:
            progressed = self._prefill() if self._scheduler.is_prefill_next() else self._round()
        except BaseException:
            self._recover()
            raise
        inside = sum(self.stats.seconds.values()) - measured
        self.stats.seconds["other"] += time.perf_counter() - start - inside
        return progressed

    def _recover(self) -> None:
        """After a pass that failed: nothing of it counts, and what the caches lack is prefilled next."""
        for slot, request in enumerate(self.rows.requests):
            if request is not None:
                self.rows.roll_back(slot)
            if self.drafter is not None:
                self.drafter.recover(self.rows, slot)
            self._scheduler.recover(slot)

    def _prefill(self) -> list[Request]:
        """A round in which nothing is drafted, over new prompts; it yields tokens if it completes them."""
        prefill = self._scheduler.next_pass()
        self.rows.span = prefill.span
        self.in_pass = [self._scheduler.prefilling[slot] for slot in range(prefill.span.start, prefill.span.stop)]
        if prefill.yields_tokens:
            self._scheduler.start_decoding(prefill.span)
        draft = Draft(Candidates.none(self.rows.num_spanned, self.rows.device))
        token_ids, num_tokens = padded(prefill.token_lists, self.rows.device)
        with self.stats.timed("verify"):
            outputs = forward_last(
                self.model, self.rows.cache, self.rows.span, token_ids, num_tokens, **self._target_kwargs()
            )
        if prefill.yields_tokens:
            return self._finish_round(draft, outputs, is_prefill=True)
        self.stats.target_forwards += 1
        self._observe(draft.candidates, outputs)
        if prefill.is_last:
            self._scheduler.start_decoding(prefill.span)
        return []

    def _round(self) -> list[Request]:
        occupied = [slot for slot, request in enumerate(self.rows.requests) if request is not None]
        self.rows.span = slice(occupied[0], occupied[-1] + 1)
        self.in_pass = [request for _, request in self.rows.live()]
        with self.stats.timed("draft"):
            draft = draft_block(self.drafter, self.rows, self._most_candidates())
        self.stats.draft_forwards += draft.num_forwards
        candidates = draft.candidates
        anchors, _ = padded([tokens or [0] for tokens in self.rows.pending(self.rows.cache)], self.rows.device)
        assert anchors.shape[1] == 1, "a cache holds all committed tokens but the last"
        is_live = torch.tensor([request is not None for request in self.rows.spanned])
        with self.stats.timed("verify"):
            outputs = forward(
                self.model,
                self.rows.cache,
                self.rows.span,
                torch.cat([anchors, candidates.token_ids], dim=1),
                (candidates.lengths + 1) * is_live,
                **self._target_kwargs(),
            )
        return self._finish_round(draft, outputs, is_prefill=False)

    def _most_candidates(self) -> int:
        free, cache = MAX_CANDIDATES, self.rows.cache
        if cache.capacity is not None:  # a short row's padding must fit behind the longest row
            free = min(free, cache.capacity - int(cache.lengths[self.rows.span].max()) - 1)
        return free

    def _target_kwargs(self) -> dict[str, Any]:
        return {} if self.drafter is None else self.drafter.target_kwargs()

    def _finish_round(self, draft: Draft, outputs: ModelOutput, is_prefill: bool) -> list[Request]:
        self.stats.target_forwards += 1
        candidates, rows = draft.candidates, self.rows
        with self.stats.timed("processors"):
            scores = score(rows, outputs.logits, candidates.token_ids, candidates.lengths)
            verification = self._verify(candidates, scores.values)
            results = round_results(rows, candidates, verification, scores, outputs.logits)
        self._observe(candidates, outputs)
        if is_prefill:
            self._scheduler.share()
        if self.on_round is not None:
            self.on_round(rows, candidates, verification)
        for result in apply_stops(results):
            self._commit(result, scores.values, outputs.logits)
            self._recorder.add(result, is_prefill, result.row in draft.rows)
        requests = [result.request for result in results]
        self._apply_criteria(requests)
        self._recorder.settle()
        return requests

    def _observe(self, candidates: Candidates, outputs: ModelOutput) -> None:
        if self.drafter is not None:
            with self.stats.timed("draft"):
                self.drafter.observe(self.rows, candidates, outputs)

    def _verify(self, candidates: Candidates, scores: Tensor) -> Verification:
        do_sample = [request is not None and request.rules.do_sample for request in self.rows.spanned]
        if not any(do_sample):
            return verify(candidates, scores, do_sample)
        noise = verification_noise(self.rows.noises, candidates.lengths, candidates.token_ids.shape[1])
        return verify(candidates, scores, do_sample, noise.to(scores.device))

    def _commit(self, result: RowResult, scores: Tensor, logits: Tensor) -> None:
        request, slot = result.request, self.rows.span.start + result.row
        request.keep(scores[result.row], logits[result.row], result.token_ids)
        self.rows.commit(slot, result.token_ids)
        if result.finish_reason is not None:
            request.finish(result.finish_reason, error=result.error)
            self.rows.leave(slot)

    def _apply_criteria(self, requests: list[Request]) -> None:
        concerned = [request for request in requests if request.rules.unknown_criteria or not request.is_alone]
        for batch in {id(request.batch): request.batch for request in concerned}.values():
            try:
                apply_criteria(batch)
            finally:
                for request in batch.requests:
                    if request is not None and request.finish_reason is not None:
                        self._scheduler.remove(request)

    def idle_pass(self) -> None:
        """What a rank without work runs so that the others' collectives complete; changes nothing."""
        token_ids = torch.zeros(1, 1, dtype=torch.long, device=self.rows.device)
        with torch.no_grad():
            self.model(input_ids=token_ids, use_cache=False, **self._target_kwargs())


def _check_kinds(model: object, drafter: object, limits: object, on_round: object) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"`model` has to be a causal language model, but is a {type(model).__name__!r}.")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise TypeError(
            f"`drafter` has to be a `Drafter`, but is a {type(drafter).__name__!r}. Wrap a draft model in "
            "`CausalLMDrafter`, a `DSparkModel` in `DSparkDrafter`."
        )
    if not isinstance(limits, CacheLimits):
        raise TypeError(f"`limits` has to be `CacheLimits`, but is {limits!r}.")
    if on_round is not None and not callable(on_round):
        raise TypeError(f"`on_round` has to be callable, but is {on_round!r}.")
