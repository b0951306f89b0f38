"""PromptEncoder: prompts of every kind become requests.

The place where text and tokens meet; knows the tokenizer and the size of the model's window, but runs nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
)

from ..engine.model_facts import check_ids, context_length, eos_ids, execution_device, vocab_size
from ..engine.noise import MAX_SEED
from ..engine.request import Request
from ..engine.rules import DecodingRules
from ..logits_process.bias_and_masks import UndecodableMask
from .detokenizer import TextAssembler, TextStop
from .job import Job
from .sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, ids, or chat messages


class PromptEncoder:
    """
    Makes jobs of prompts.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Says which ids there are and how many positions.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer; left as it is.
        truncate_prompt (`str`, *optional*):
            `"left"` keeps the end of prompts that are too long.
        mask_undecodable (`bool`, *optional*, defaults to `True`):
            Whether ids that the tokenizer cannot decode, and padding, are never generated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        truncate_prompt: str | None = None,
        mask_undecodable: bool = True,
    ):
        if truncate_prompt not in (None, "left"):
            raise ValueError(f'`truncate_prompt` has to be None or "left", but is {truncate_prompt!r}.')
        self.model = model
        self.tokenizer = tokenizer
        self.truncate_prompt = truncate_prompt
        self.eos_token_ids = eos_ids_of(model, tokenizer)
        self.window = context_length(model)
        self.masks: list[LogitsProcessor] = []
        self.vocab_size = vocab_size(model)
        if mask_undecodable:
            self.masks = undecodable_masks(model, tokenizer, self.eos_token_ids)

    def jobs(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> list[Job]:
        """The jobs of one prompt, one per sample; a single one with the error if it is refused."""
        text = prompt if isinstance(prompt, str) else ""
        try:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"`params` has to be `SamplingParams`, but is {params!r}.")
            if params.logprobs is not None and params.logprobs > self.vocab_size:
                raise ValueError(
                    f"`logprobs` has to be at most the vocabulary's {self.vocab_size}, but is {params.logprobs}."
                )
            self._check_named_ids(params)
            text, whole_ids = self.encode(prompt)
            prompt_ids = self._fitted(whole_ids, params.max_new_tokens)
            if len(prompt_ids) < len(whole_ids):
                text = self.tokenizer.decode(prompt_ids)
            return [self._job(text, prompt_ids, params, index, sample) for sample in range(params.n)]
        except (ValueError, TypeError) as error:
            return [Job(text, None, index=index, error=error)]

    def encode(self, prompt: Prompt) -> tuple[str, list[int]]:
        """A prompt as the model sees it, as text and as ids."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer(prompt)["input_ids"]
        entries: list[Any] = list(prompt)
        if entries and all(isinstance(message, Mapping) for message in entries):
            try:
                text = self.tokenizer.apply_chat_template(entries, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # templates raise jinja2's errors, which are no ValueErrors
                raise ValueError(f"The chat template cannot render {entries!r}: {error}") from error
            return text, self.tokenizer(text, add_special_tokens=False)["input_ids"]
        check_ids(self.model, Request(entries, 1))  # refuses what are no ids, and what cannot be decoded
        return self.tokenizer.decode(entries), entries

    def _fitted(self, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
        if self.window is None or len(prompt_ids) + max_new_tokens <= self.window:
            return prompt_ids
        room = self.window - max_new_tokens
        if self.truncate_prompt == "left" and room > 0:
            return prompt_ids[-room:]
        raise ValueError(
            f"A prompt of {len(prompt_ids)} tokens and `max_new_tokens` of {max_new_tokens} exceed the model's "
            f"{self.window} positions. Shorten one of them, or set `truncate_prompt='left'`."
        )

    def _check_named_ids(self, params: SamplingParams) -> None:
        """Refuses ids that could never be biased or reached."""
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            if outside := [i for i in map(int, ids) if not 0 <= i < self.vocab_size]:
                raise ValueError(f"`{name}` names {outside}, but the model's vocabulary has {self.vocab_size} ids.")

    def _job(self, text: str, prompt_ids: list[int], params: SamplingParams, index: int, sample: int) -> Job:
        assembler = TextAssembler(self.tokenizer, params.stop, prompt_ids)
        rules = DecodingRules(
            logits_processor=params.logits_processor(
                len(prompt_ids), self.eos_token_ids, self.masks, execution_device(self.model)
            ),
            eos_token_ids=params.stop_ids(self.eos_token_ids),
            do_sample=not params.is_greedy,
        )
        seed = None if params.seed is None else (params.seed + sample) % (MAX_SEED + 1)
        request = Request(
            prompt_ids,
            params.max_new_tokens,
            rules,
            seed,
            text=TextStop(assembler),
            num_logprobs=params.logprobs,
        )
        check_ids(self.model, request)
        return Job(text, request, assembler, index, sample, wants_logprobs=params.logprobs is not None)


def eos_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a text: those of the generation config, else the tokenizer's."""
    eos = model.generation_config.eos_token_id
    return eos_ids(tokenizer.eos_token_id if eos is None else eos)


def undecodable_masks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]
) -> list[LogitsProcessor]:
    """What forbids the ids that the tokenizer does not know, behind its own or between them, and padding."""
    num_scored = vocab_size(model)
    known = set(tokenizer.get_vocab().values())
    size = max(known) + 1
    masks: list[LogitsProcessor] = []
    if num_scored > size or tokenizer.pad_token_id is not None:
        masks.append(UndecodableMask(size, tokenizer.pad_token_id, sorted(eos_token_ids)))
    if gaps := [token_id for token_id in range(min(size, num_scored)) if token_id not in known]:
        masks.append(SuppressTokensLogitsProcessor(gaps, device=execution_device(model)))
    return masks
