"""SamplingParams: how the text of one request is chosen and what ends it, validated once.

Knows transformers' processors and this package's, but no model, tokenizer or loop.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..arguments import checked_number
from ..engine.noise import MAX_SEED
from ..logits_process.bias_and_masks import LogitBias
from ..logits_process.token_penalties import TokenPenalties

MIN_TEMPERATURE = 1e-5  # scores divided by much less leave the range of fp32
TRANSFORMERS_TOP_K = 50  # what `generate` takes where a GenerationConfig that samples names none

READ_SETTINGS = frozenset(
    "do_sample eos_token_id max_length max_new_tokens min_new_tokens min_p num_return_sequences repetition_penalty "
    "stop_strings temperature top_k top_p".split()
)
# They change no text: how to compute, what to return, how to draft, and what only beams or encoders read.
SILENT_SETTINGS = frozenset(
    "_from_model_config assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id "
    "cache_config cache_implementation compile_config continuous_batching_config decoder_start_token_id "
    "disable_compile early_stopping is_assistant length_penalty max_cache_len max_matching_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states output_logits "
    "output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens renormalize_logits "
    "return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache use_mtp".split()
)
# Settings that are not served, with the value at which they do nothing.
NEUTRAL_SETTINGS = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "low_memory": False,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "remove_invalid_values": False,
    "token_healing": False,
    "typical_p": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    r"""
    What a caller may ask of one request, in the words of OpenAI's API, vLLM and transformers.

    Args:
        max_new_tokens (`int`, *optional*, defaults to 256):
            The budget.
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
            Texts that end the row; they are no part of its text.
        stop_token_ids (`Collection[int]`, *optional*, defaults to `()`):
            Ids that end the row, besides the model's own.
        ignore_eos (`bool`, *optional*, defaults to `False`):
            Whether to go on behind the model's own end of sequence.
        min_new_tokens (`int`, *optional*, defaults to 0):
            No id that ends the row is chosen before so many tokens. Stop strings hold from the start.
        seed (`int`, *optional*):
            Seeds the request's own random numbers. Fresh ones by default.
        n (`int`, *optional*, defaults to 1):
            Texts per prompt.
        logprobs (`int`, *optional*):
            Report log-probabilities: of the chosen tokens and of so many best ones at each position.

    Raises:
        `ValueError` or `TypeError`: naming the field, the rule and the value.
    """

    max_new_tokens: int = 256
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

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_distribution()
        self._check_ends()

    def _check_counts(self) -> None:
        for name, minimum in {"max_new_tokens": 1, "min_new_tokens": 0, "n": 1}.items():
            self._set(name, _checked_count(name, getattr(self, name), minimum))
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` has to be at most `max_new_tokens` ({self.max_new_tokens}), "
                f"but is {self.min_new_tokens}."
            )
        self._set("top_k", 0 if self.top_k is None else _checked_count("top_k", self.top_k, 0))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _checked_count(name, getattr(self, name), 0))
        if self.seed is not None and self.seed > MAX_SEED:
            raise ValueError(f"`seed` has to be between 0 and {MAX_SEED}, but is {self.seed}.")

    def _check_distribution(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            self._set(name, checked_number(name, getattr(self, name)))
        if self.temperature != 0.0 and self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"`temperature` has to be 0 (the best token each time) or at least {MIN_TEMPERATURE}, "
                f"but is {self.temperature}."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"`top_p` has to be above 0 and at most 1, but is {self.top_p}. Pass 1.0 for none.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"`min_p` has to be between 0 and 1, but is {self.min_p}.")
        if self.penalty_scope is not None and self.penalty_scope not in ("all", "generated"):
            raise ValueError(f'`penalty_scope` has to be None, "all" or "generated", but is {self.penalty_scope!r}.')
        TokenPenalties(self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        if self.logit_bias is not None:
            try:
                self._set("logit_bias", LogitBias(self.logit_bias).bias or None)
            except (TypeError, ValueError) as error:
                raise type(error)(f"`logit_bias` cannot be used: {error}") from error

    def _check_ends(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"`stop` has to be a text or a sequence of texts, but is {self.stop!r}.")
        if "" in stop:
            raise ValueError(f"`stop` has to hold no empty text, which would end every row at once: {self.stop!r}.")
        self._set("stop", tuple(stop))
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Collection):
            raise TypeError(f"`stop_token_ids` has to be a collection of ints, but is {self.stop_token_ids!r}.")
        self._set("stop_token_ids", tuple(_checked_count("stop_token_ids", i, 0) for i in self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"`ignore_eos` has to be a bool, but is {self.ignore_eos!r}.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

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

    def to_generation_config(
        self, eos_token_ids: Collection[int], pad_token_id: int | None = None
    ) -> GenerationConfig:
        """
        For plain `model.generate`, together with `extra_processors`. `seed` and `logprobs` have no place in it, and
        stop strings need `tokenizer=` and stay in the ids there. As always, `generate` takes settings that are left
        None from the model's own config.

        Args:
            eos_token_ids (`Collection[int]`): The model's own ids that end a row.
            pad_token_id (`int`, *optional*): Needed where no id ends a row and the model has no padding.

        Raises:
            `ValueError`: by transformers, for several texts without sampling.
        """
        warpers: dict[str, Any] = {}
        if not self.is_greedy:
            warpers = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            do_sample=not self.is_greedy,
            repetition_penalty=self.repetition_penalty if self._repetition_scope == "all" else 1.0,
            num_return_sequences=self.n,
            stop_strings=list(self.stop) or None,
            eos_token_id=sorted(self.stop_ids(eos_token_ids)),
            pad_token_id=pad_token_id,
            **warpers,
        )

    def extra_processors(self, prompt_length: int) -> LogitsProcessorList:
        """What `to_generation_config` cannot say, as `logits_processor` for plain `model.generate`."""
        rest = replace(self, repetition_penalty=1.0) if self._repetition_scope == "all" else self
        return LogitsProcessorList([*rest._penalties(prompt_length), *self._bias()])

    @classmethod
    def from_generation_config(cls, config: GenerationConfig, eos_token_ids: Collection[int] = ()) -> "SamplingParams":
        """
        What `model.generate` would do by this config, where it is of use here. Settings that are None have
        transformers' defaults (`top_k` 50), but for the budget, which is this class's own.

        Args:
            config (`GenerationConfig`): Settings of how to compute, draft and return are passed over.
            eos_token_ids (`Collection[int]`, *optional*, defaults to `()`):
                The ids that end a row anyway. If the config names others instead, these are ignored.

        Raises:
            `ValueError`: naming every setting that cannot be served.
        """
        settings = {name: value for name, value in config.to_dict().items() if value is not None}
        unserved = {
            name: value
            for name, value in settings.items()
            if name not in READ_SETTINGS | SILENT_SETTINGS
            and (name not in NEUTRAL_SETTINGS or value != NEUTRAL_SETTINGS[name])
        }
        if "max_length" in settings and "max_new_tokens" not in settings:
            unserved["max_length"] = settings["max_length"]
        if unserved:
            raise ValueError(f"`config` has to do without what `SamplingParams` cannot express, but has {unserved}.")
        names = ["max_new_tokens", "min_new_tokens", "repetition_penalty"]
        wanted: dict[str, Any] = {"temperature": 0.0}
        if settings.get("do_sample", False):
            names += ["temperature", "top_p", "min_p"]
            wanted = {"top_k": settings.get("top_k", TRANSFORMERS_TOP_K)}
        wanted |= {name: settings[name] for name in names if name in settings}
        if "eos_token_id" in settings:
            ends = settings["eos_token_id"]
            ends = [ends] if isinstance(ends, int) else ends
            keeps_eos = set(eos_token_ids) <= set(ends) and (len(eos_token_ids) > 0 or not ends)
            wanted["stop_token_ids"] = [i for i in ends if i not in eos_token_ids] if keeps_eos else ends
            wanted["ignore_eos"] = not keeps_eos
        return cls(**wanted, n=settings.get("num_return_sequences", 1), stop=settings.get("stop_strings", ()))


def _checked_count(name: str, value: int, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` has to be an int, but is {value!r}.")
    if value < minimum:
        raise ValueError(f"`{name}` has to be at least {minimum}, but is {value}.")
    return int(value)
