"""GenerationBackend: text in, text out, for one model.

Nothing runs in the background: whoever waits for text runs the next round, for everyone. So threads can share a
backend, and when nobody reads, nothing is computed.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..arguments import checked_number, shown
from ..engine.decoder import Decoder
from ..engine.stats import DecodingStats
from .async_stream import AsyncTextStream
from .completion import Completion
from .job import Call, Job
from .portable import remove_capturing_hooks
from .prompt_encoder import Params, Prompt, PromptEncoder
from .request_error import RequestError
from .sampling_params import DEFAULT_PARAMS, SamplingParams
from .shared_decoder import SharedDecoder
from .streams import BatchStream, TextStream

RequestIds = str | Sequence[str]


class _Progress(tqdm):
    monitor_interval = 0  # no thread that watches the bar


if hasattr(os, "register_at_fork"):  # another thread may be drawing a bar
    os.register_at_fork(after_in_child=lambda: _Progress.set_lock(threading.RLock()))


class GenerationBackend:
    """
    Generates text with one model. Made by [`get_generation_backend`].

    A model that is in training mode decodes in eval mode: dropout would make the text random. Its modules train on
    afterwards. A backend can be pickled, copied and forked: it is then built anew, without its requests.

    Args:
        make_decoder (`Callable[[], Decoder]`), make_encoder (`Callable[..., PromptEncoder]`):
            Make the two parts for one model, the encoder with `longest_row=`; they can be pickled where the backend is
            to be.
    """

    def __init__(self, make_decoder: Callable[[], Decoder], make_encoder: Callable[..., PromptEncoder]):
        self._makers = (make_decoder, make_encoder)
        self._shared = SharedDecoder(make_decoder)
        shared = self._shared  # not the backend: what holds itself is freed late
        self._encoder = make_encoder(longest_row=lambda length: shared.decoder.longest_row(length))

    def __repr__(self) -> str:
        decoder = self._shared.decoder
        return (
            f"GenerationBackend({type(self.model).__name__}, drafter={decoder.drafter!r}, "
            f"max_batch_size={len(decoder.rows.requests)}, tokenizer={type(self.tokenizer).__name__})"
        )

    def __reduce__(self) -> tuple[type, tuple]:
        for model in self._shared.decoder.models:
            self._shared.between_rounds(partial(remove_capturing_hooks, model))
        return GenerationBackend, self._makers

    @property
    def model(self) -> PreTrainedModel:
        """The target."""
        return self._encoder.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return self._encoder.tokenizer

    @property
    def stats(self) -> DecodingStats:
        """The counts of everything so far."""
        return self._shared.decoder.stats

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> TextStream:
        """
        Yields one text as it grows. No piece holds half a character, or a part of a stop string.

        Args:
            prompt (`str`, `list[int]` or `list[dict]`):
                Text, ids, or chat messages, to which the chat template is applied.
            params ([`SamplingParams`], *optional*):
                How to decode, with `n` of 1.
            request_id (`str`, *optional*), timeout (`float`, *optional*):
                As in `generate`.

        Raises:
            `ValueError` or `TypeError`: if the request is refused, at once. What fails later is raised by the stream.
        """
        jobs = self._encoder.jobs(prompt, params)
        if len(jobs) > 1:
            raise RequestError(f"`stream` yields one text, but `n` is {len(jobs)}; use `stream_batch`.", param="n")
        call = _named([jobs], request_id)
        stream = self._submitted(call, timeout)
        if call.error is not None:
            raise call.error
        return TextStream(stream)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncTextStream:
        """
        As `stream`, for asyncio: `async for piece in backend.astream(prompt)`. Cancelling the task frees the slot.

        Args:
            prompt, params, request_id, timeout:
                As in `stream`. A request that is refused raises when the stream is first read.
        """
        return AsyncTextStream(lambda: self.stream(prompt, params, request_id, timeout))

    def stream_batch(
        self,
        prompts: Iterable[Prompt],
        params: Params = DEFAULT_PARAMS,
        request_ids: RequestIds | None = None,
        timeout: float | None = None,
    ) -> BatchStream:
        """
        Yields pieces of many texts as they grow, as `(number of the completion, piece)`.

        Args:
            prompts (`Iterable`):
                Prompts as in `stream`.
            params ([`SamplingParams`] or an iterable of them, *optional*):
                For all prompts, or one for each.
            request_ids (`str` or `Sequence[str]`, *optional*), timeout (`float`, *optional*):
                As in `generate`.
        """
        return self._submitted(_named(self._encoder.all_jobs(prompts, params), request_ids), timeout)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = DEFAULT_PARAMS,
        has_unfinished_peers: Callable[[bool], bool] | None = None,
        request_ids: RequestIds | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> list[Completion]:
        """
        Completes many prompts, with a progress bar on a terminal. If its thread is interrupted, its requests end.

        Args:
            prompts (`Iterable`):
                Prompts as in `stream`.
            params ([`SamplingParams`] or an iterable of them, *optional*):
                For all prompts, or one for each.
            has_unfinished_peers (`Callable[[bool], bool]`, *optional*):
                For a model that is sharded over ranks, whose passes happen on all of them: see [`Decoder.run`].
            request_ids (`str` or `Sequence[str]`, *optional*):
                Names for [`~GenerationBackend.abort`]: one for the whole call, or one for each prompt.
            timeout (`float`, *optional*):
                Seconds after which requests end that have not ended, with finish reason `"time"`, between two rounds.
            raise_on_error (`bool`, *optional*, defaults to `False`):
                Whether to raise the first error as soon as a request is refused or has failed.

        Returns:
            The completions in the order of the prompts, `n` for each. A request that was refused or failed has the
            finish reason `"error"` and its `error`; the others are not concerned. An exception of the model fails the
            requests whose tokens were in that pass. One warning per call tells how many failed, and the first reason.
        """
        call = _named(self._encoder.all_jobs(prompts, params), request_ids)
        try:
            self._submit(call, timeout, longest_first=True)  # so that few slots are empty last
            with _Progress(total=len(call.jobs), desc="prompts", disable=None if len(call.jobs) > 1 else True) as bar:
                while has_unfinished_peers(call.num_open > 0) if has_unfinished_peers else call.num_open:
                    if raise_on_error and call.error is not None:
                        break
                    if has_unfinished_peers:
                        self._shared.run_pass(call)
                    else:
                        self._shared.advance(call)
                    bar.update(len(call.jobs) - call.num_open - bar.n)
        finally:
            self._shared.release(call.jobs)
        if raise_on_error and call.error is not None:
            raise call.error
        completions = [job.completion() for job in call.jobs]
        _tell_of_errors(completions)
        return completions

    def abort(self, request_id: str) -> bool:
        """
        Ends the requests of that name with finish reason `"aborted"`, at the latest when the round ends that is being
        run. Never waits. Returns whether there was one that had not ended.
        """
        return self._shared.abort(request_id)

    def refusal(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS) -> Exception | None:
        """What a request would be refused with, None if it would be served. Runs nothing."""
        call = Call(self._encoder.jobs(prompt, params)[:1])
        self._shared.submit(call)
        self._shared.release(call.jobs)
        return call.error

    def _submit(self, call: Call, timeout: float | None, longest_first: bool = False) -> None:
        deadline = None
        if timeout is not None:
            if checked_number("timeout", timeout) <= 0:
                raise ValueError(f"`timeout` has to be above 0 seconds, but is {timeout}. Pass None for none.")
            deadline = self._shared.clock() + timeout
        self._shared.submit(call, deadline, longest_first)

    def _submitted(self, call: Call, timeout: float | None) -> BatchStream:
        try:
            self._submit(call, timeout)
            return BatchStream(call, self._shared.advance, self._shared.release)
        except BaseException:  # an interrupt: nobody will read what is queued
            self._shared.release(call.jobs)
            raise


def _named(jobs: list[list[Job]], request_ids: RequestIds | None) -> Call:
    """A call of the jobs of each prompt, with their names."""
    if not isinstance(request_ids, Sequence | None) or not all(isinstance(name, str) for name in request_ids or ()):
        raise TypeError(f"Request ids have to be texts, but are {shown(request_ids)}.")
    names = [request_ids] * len(jobs) if request_ids is None or isinstance(request_ids, str) else list(request_ids)
    if len(names) != len(jobs):
        raise ValueError(f"`request_ids` has to hold one name per prompt, {len(jobs)}, but holds {len(names)}.")
    if not isinstance(request_ids, str) and request_ids is not None and len(set(names)) < len(names):
        raise ValueError(f"`request_ids` has to hold each name once, but is {shown(request_ids)}.")
    for name, own in zip(names, jobs):
        for job in own:
            job.name = name
    return Call([job for own in jobs for job in own])


def _tell_of_errors(completions: list[Completion]) -> None:
    failed = [completion for completion in completions if completion.error is not None]
    if failed:
        first = failed[0]
        warnings.warn(
            f"{len(failed)} of {len(completions)} requests were refused or failed: see `error` of their completions, "
            f"or pass `raise_on_error=True`. The first one is of prompt {first.index}: "
            f"{type(first.error).__name__}: {first.error}",
            stacklevel=3,
        )
