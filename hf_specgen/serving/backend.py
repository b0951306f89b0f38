"""GenerationBackend: text in, text out, for one model.

Nothing runs in the background: whoever waits for text runs the next round, for everyone. So threads can share a
backend, and when nobody reads, nothing is computed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.decoder import Decoder
from ..engine.drafter import Drafter
from ..engine.scheduler import CacheLimits
from ..engine.stats import DecodingStats
from ..generation.enable import unwrap
from .completion import Completion
from .job import Job
from .prompt_encoder import Prompt, PromptEncoder
from .sampling_params import SamplingParams
from .streams import BatchStream, TextStream

DEFAULT_PARAMS = SamplingParams()
Params = SamplingParams | Sequence[SamplingParams]


class _Progress(tqdm):
    monitor_interval = 0  # no thread that watches the bar


@dataclass(frozen=True)
class BackendSettings:
    """
    Everything that can be set about a backend; each kind takes some of it.

    Args:
        max_batch_size (`int`, *optional*, defaults to 8):
            Requests that are decoded side by side; the others wait.
        max_tokens_in_cache (`int`, *optional*), prefill_chunk_size (`int`, *optional*, defaults to 512):
            See [`CacheLimits`].
        truncate_prompt (`str`, *optional*):
            `"left"` keeps the end of a prompt that does not fit into the model's positions with its budget. By
            default it is refused.
        mask_undecodable (`bool`, *optional*, defaults to `True`):
            Whether ids that the tokenizer cannot decode, and padding, are never generated or drafted.
        draft_model (*optional*):
            A [`DSparkModel`], a smaller causal language model with the same tokenizer, or a [`Drafter`]. The
            speculative backend looks up n-grams in a row's own text if there is none.
        num_assistant_tokens (`int`, *optional*), assistant_confidence_threshold (`float`, *optional*):
            As in `generate`.
    """

    max_batch_size: int = 8
    max_tokens_in_cache: int | None = None
    prefill_chunk_size: int = 512
    truncate_prompt: str | None = None
    mask_undecodable: bool = True
    draft_model: Any = None
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float | None = None


class GenerationBackend:
    """
    Generates text with one model. Use one of its kinds, or [`get_generation_backend`].

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target, in `eval` mode.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer; left as it is.
        settings (`dict[str, Any]`, *optional*):
            Fields of [`BackendSettings`] that this kind takes.

    Raises:
        `ValueError` or `TypeError`: for settings that are unknown or wrong, or models that the loop cannot serve.
    """

    name: ClassVar[str]
    served_settings: ClassVar[frozenset[str]]

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any):
        self.check_settings(settings)
        self.settings = BackendSettings(**self.fixed_settings(), **settings)
        self.model = unwrap(model)
        self.tokenizer = tokenizer
        limits = CacheLimits(None, self.settings.max_tokens_in_cache, self.settings.prefill_chunk_size)
        self._decoder = Decoder(self.model, self.make_drafter(), self.settings.max_batch_size, limits)
        self._encoder = PromptEncoder(
            self.model, tokenizer, self.settings.truncate_prompt, self.settings.mask_undecodable
        )
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of who has the lock next: one thread's rounds do not shut the others out
        self._jobs: dict[int, Job] = {}  # those that have not ended, by the id of their request
        self._named: dict[str, Job] = {}
        self._abandoned: deque[Job] = deque()

    @classmethod
    def check_settings(cls, names: Iterable[str]) -> None:
        """Raises `ValueError` if this kind does not take settings of all these names."""
        if unknown := sorted(set(names) - cls.served_settings):
            raise ValueError(
                f"The backend {cls.name!r} has no setting `{unknown[0]}`; it takes {sorted(cls.served_settings)}."
            )

    def fixed_settings(self) -> dict[str, Any]:
        """What this kind does not leave to the caller."""
        return {}

    def make_drafter(self) -> Drafter | None:
        """What proposes candidates, None for plain decoding."""
        return None

    @property
    def stats(self) -> DecodingStats:
        """The counts of everything so far."""
        return self._decoder.stats

    def stream(
        self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS, request_id: str | None = None
    ) -> TextStream:
        """
        Yields one text as it grows. No piece holds half a character, or a part of a stop string.

        Args:
            prompt (`str`, `list[int]` or `list[dict]`):
                Text, ids, or chat messages, to which the chat template is applied.
            params ([`SamplingParams`], *optional*):
                How to decode, with `n` of 1.
            request_id (`str`, *optional*):
                A name for [`~GenerationBackend.abort`].

        Raises:
            `ValueError` or `TypeError`: if the request is refused, at once. What fails later is raised by the stream.
        """
        jobs = self._encoder.jobs(prompt, params)
        if len(jobs) > 1:
            raise ValueError(f"`stream` yields one text, but `n` is {len(jobs)}; use `stream_batch`.")
        self._submit(jobs, request_id)
        if jobs[0].error is not None:
            raise jobs[0].error
        return TextStream(BatchStream(self, jobs))

    def stream_batch(self, prompts: Sequence[Prompt], params: Params = DEFAULT_PARAMS) -> BatchStream:
        """
        Yields pieces of many texts as they grow, as `(number of the completion, piece)`.

        Args:
            prompts (`Sequence`):
                Prompts as in `stream`.
            params ([`SamplingParams`] or a sequence of them, *optional*):
                For all prompts, or one for each.
        """
        jobs = self._encode_all(prompts, params)
        self._submit(jobs)
        return BatchStream(self, jobs)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = DEFAULT_PARAMS,
        has_unfinished_peers: Callable[[bool], bool] | None = None,
    ) -> list[Completion]:
        """
        Completes many prompts, with a progress bar on a terminal.

        Args:
            prompts (`Sequence`):
                Prompts as in `stream`.
            params ([`SamplingParams`] or a sequence of them, *optional*):
                For all prompts, or one for each.
            has_unfinished_peers (`Callable[[bool], bool]`, *optional*):
                For a model that is sharded over ranks, whose passes happen on all of them: see [`Decoder.run`].

        Returns:
            The completions in the order of the prompts, `n` for each. A request that was refused or failed has the
            finish reason `"error"` and its `error`; the others are not concerned.
        """
        jobs = self._encode_all(prompts, params)
        self._submit(sorted(jobs, key=lambda job: -job.budget))  # the longest first, so that few seats are empty last
        try:
            with _Progress(total=len(jobs), desc="prompts", disable=None if len(jobs) > 1 else True) as progress:
                pending = [job for job in jobs if not job.is_done]
                while has_unfinished_peers(bool(pending)) if has_unfinished_peers else pending:
                    with self._exclusively():
                        if pending:
                            self._step()
                        else:
                            self._decoder.idle_pass()
                    pending = [job for job in pending if not job.is_done]
                    progress.update(len(jobs) - len(pending) - progress.n)
        finally:
            self._release(jobs)
        return [job.completion() for job in jobs]

    def abort(self, request_id: str) -> bool:
        """Ends the request of that name with finish reason `"aborted"`; whether there was one that had not ended."""
        with self._exclusively():
            job = self._named.get(request_id)
            if job is None or job.is_done:
                return False
            self._drop(job)
            return True

    def _encode_all(self, prompts: Sequence[Prompt], params: Params) -> list[Job]:
        if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
            raise TypeError(f"`prompts` has to be a list of prompts, but is {prompts!r}.")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"`params` has to hold one entry per prompt, {len(prompts)}, but holds {len(each)}.")
        return [
            job
            for index, (prompt, own) in enumerate(zip(prompts, each))
            for job in self._encoder.jobs(prompt, own, index)
        ]

    def _submit(self, jobs: list[Job], request_id: str | None = None) -> None:
        """Queues the jobs; one that the decoder refuses keeps the error."""
        with self._exclusively():
            if request_id is not None:
                if request_id in self._named:
                    raise ValueError(f"`request_id` {request_id!r} belongs to a request that has not ended.")
                self._named[request_id] = jobs[0]
            accepted = [(job, job.request) for job in jobs if job.request is not None]
            try:
                self._decoder.add(*(request for _, request in accepted))
            except ValueError:  # of some; the others are not concerned
                for job, request in accepted:
                    try:
                        self._decoder.add(request)
                    except ValueError as error:
                        job.error = error
            self._jobs |= {id(request): job for job, request in accepted}

    def _advance(self, jobs: list[Job]) -> list[tuple[int, str]]:
        """Runs rounds until one of the jobs has a piece; none if all have ended."""
        while True:
            with self._exclusively():
                pieces = [(number, piece) for number, job in enumerate(jobs) if (piece := job.take_piece())]
                if pieces or all(job.is_done for job in jobs):
                    return pieces
                self._step()

    def _step(self) -> None:
        """One round for everyone. If it fails, every job that has not ended does, with that error."""
        try:
            with self._decoder.fast_attention():
                self._decoder.step()
        except BaseException as error:
            for job in list(self._jobs.values()):
                job.error = error if isinstance(error, Exception) else RuntimeError("Generation was interrupted.")
                self._drop(job)
            raise

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Holds the lock, and tidies up before it is given back."""
        with self._turn:
            self._lock.acquire()
        try:
            yield
        finally:
            try:
                self._tidy_up()
            finally:
                self._lock.release()
            self._release([])  # those left behind since

    def _tidy_up(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.popleft())
        self._jobs = {key: job for key, job in self._jobs.items() if not job.is_done}
        self._named = {name: job for name, job in self._named.items() if not job.is_done}
        if not self._decoder.has_unfinished:
            self._decoder.release()

    def _release(self, jobs: list[Job], is_collected: bool = False) -> None:
        """Ends jobs that nobody waits for."""
        self._abandoned.extend(job for job in jobs if not job.is_done)
        # The collector may run inside a round, on the thread that holds the lock: then that round sees to them.
        if self._abandoned and not (is_collected and (self._turn.locked() or self._lock.locked())):
            with self._exclusively():
                pass

    def _drop(self, job: Job) -> None:
        if job.request is not None:
            self._decoder.abort(job.request)
