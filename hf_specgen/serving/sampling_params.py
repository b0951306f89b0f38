"""SamplingParams: how the text of one request is chosen and what ends it, validated once.

Knows transformers' processors and this package's, but no model, tokenizer or loop.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..engine.logprobs import LogprobsMode
from ..logits_process.bias_and_masks import LogitBias
from ..logits_process.token_penalties import TokenPenalties
from .parameter_checks import CHECKS
from .parameter_names import with_hints
from .request_error import RequestError, refused

DEFAULT_BUDGET = 256  # tokens of a request that names none, if there is room
TEMPLATE_FIELDS = ("tools", "documents", "chat_template_kwargs", "continue_final_message")


@with_hints
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    r"""
    What a caller may ask of one request, in the words of OpenAI's API, vLLM and transformers.

    Args:
        max_new_tokens (`int`, *optional*):
            The budget. By default what the prompt leaves of the model's window, at most 256, or `min_new_tokens` where
            that is more.
        temperature (`float`, *optional*, defaults to 1.0):
            Divides the scores. 0 takes the best token each time; `top_k`, `top_p` and `min_p` then do nothing.
        top_k (`int`, *optional*, defaults to 0):
            Keep the `top_k` best tokens. 0 or None for all.
        top_p (`float`, *optional*, defaults to 1.0):
            Keep the fewest tokens that have this probability together.
        min_p (`float`, *optional*, defaults to 0.0):
            Keep tokens that have at least this share of the best one's probability.
        repetition_penalty, frequency_penalty, presence_penalty (`float`, *optional*, default to 1.0, 0.0 and 0.0):
            As in [`TokenPenalties`].
        penalty_scope (`str`, *optional*):
            `"all"` counts prompt and generated tokens, `"generated"` the generated ones. By default, as in vLLM, the
            repetition penalty counts all and the others what was generated.
        logit_bias (`Mapping[int | str, float]`, *optional*):
            As in [`LogitBias`].
        stop (`str | Sequence[str]`, *optional*, defaults to `()`):
            Texts that end the row, of at most 16,384 characters together; they are no part of its text.
        stop_token_ids (`Collection[int]`, *optional*, defaults to `()`):
            Ids that end the row, besides the model's own; they are no part of its text either.
        ignore_eos (`bool`, *optional*, defaults to `False`):
            Whether to go on behind the model's own end of sequence.
        min_new_tokens (`int`, *optional*, defaults to 0):
            Nothing ends the row before so many tokens: no id that ends it is chosen, and, as in vLLM, a stop string
            counts only if it is complete after them.
        seed (`int`, *optional*):
            Seeds the request's own random numbers: any integer of 64 bits. Fresh ones by default.
        n (`int`, *optional*, defaults to 1):
            Texts per prompt, at most 4,096. Each sample has a seed of its own, which follows from `seed`.
        logprobs (`int`, *optional*):
            Report log-probabilities: of the chosen tokens and of so many best ones at each position, at most 1,024.
        logprobs_mode (`str`, *optional*, defaults to `"raw"`):
            Of which distribution: `"raw"` is the model's own, `"processed"` the one after penalties, bias, masks and,
            if the request samples, temperature, `top_k`, `top_p` and `min_p`: the one that tokens are drawn from,
            which a trainer needs.
        tools (`Sequence`, *optional*), documents (`Sequence[Mapping]`, *optional*):
            What the chat template shows of tools (JSON schemas or functions) and documents.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            What else the chat template knows, such as `enable_thinking`.
        continue_final_message (`bool`, *optional*, defaults to `False`):
            Whether the last message is continued in place of an answer to it.

    Raises:
        [`RequestError`], a `ValueError`, and a `TypeError` for wrong types: naming the field, the rule and the value.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_scope: str | None = None
    logit_bias: Mapping[int | str, float] | None = field(default=None, hash=False)
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    tools: Sequence[Any] | None = field(default=None, hash=False)
    documents: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)
    chat_template_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        for name, checked in CHECKS.items():
            try:
                object.__setattr__(self, name, checked(name, getattr(self, name)))
            except (TypeError, ValueError) as error:
                raise refused(error, name) from error
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"`min_new_tokens` has to be at most `max_new_tokens` ({self.max_new_tokens}), "
                f"but is {self.min_new_tokens}.",
                param="min_new_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken each time."""
        return self.temperature == 0.0

    def stop_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """The ids that end a row of a model with these `eos_token_ids`."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)

    def logits_processor(
        self,
        prompt_length: int,
        eos_token_ids: Collection[int],
        masks: Sequence[LogitsProcessor] = (),
        device: torch.device | str = "cpu",
    ) -> LogitsProcessorList:
        """
        All that changes the scores, in order: penalties, bias, masks, `min_new_tokens`, and if the request samples
        temperature, `top_k`, `top_p` and `min_p`. What would do nothing is left out.

        Args:
            prompt_length (`int`): Tokens of the prompt, which stands without padding.
            eos_token_ids (`Collection[int]`): The model's own ids that end a row.
            masks (`Sequence[LogitsProcessor]`, *optional*): What else forbids ids, such as [`UndecodableMask`].
            device (`torch.device | str`, *optional*, defaults to `"cpu"`): Where the scores will be.
        """
        processors = LogitsProcessorList([*self._penalties(prompt_length), *self._bias(), *masks])
        stop_ids = sorted(self.stop_ids(eos_token_ids))
        if self.min_new_tokens > 0 and stop_ids:
            processors.append(
                MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, stop_ids, device=device)
            )
        if self.is_greedy:
            return processors
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            processors.append(MinPLogitsWarper(self.min_p))
        return processors

    def _penalties(self, prompt_length: int) -> list[TokenPenalties]:
        """One for all where the scopes agree: it needs one pass."""
        counting, others = (self.frequency_penalty, self.presence_penalty), self.penalty_scope or "generated"
        if self._repetition_scope == others:
            wanted = [TokenPenalties(self.repetition_penalty, *counting, scope=others, prompt_length=prompt_length)]
        else:
            wanted = [
                TokenPenalties(self.repetition_penalty, scope=self._repetition_scope, prompt_length=prompt_length),
                TokenPenalties(1.0, *counting, scope=others, prompt_length=prompt_length),
            ]
        return [p for p in wanted if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1, 0, 0)]

    @property
    def _repetition_scope(self) -> str:
        return self.penalty_scope or "all"

    def _bias(self) -> list[LogitBias]:
        return [] if self.logit_bias is None else [LogitBias(self.logit_bias)]

    def template_settings(self) -> dict[str, Any]:
        """What `apply_chat_template` gets besides the messages."""
        settings: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.tools is not None:
            settings["tools"] = list(self.tools)
        if self.documents is not None:
            settings["documents"] = list(self.documents)
        if self.continue_final_message:
            return {**settings, "continue_final_message": True}
        return {**settings, "add_generation_prompt": True}


DEFAULT_PARAMS = SamplingParams()


def mixed_seed(seed: int, number: int) -> int:
    """
    A seed of 32 bits for one of the samples that a seed stands for. Seeds that are near each other have nothing in
    common, as they would if the number were added.
    """
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=4).digest())
