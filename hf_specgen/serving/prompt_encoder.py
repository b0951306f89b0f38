"""PromptEncoder: prompts of every kind become requests.

The place where text and tokens meet; knows the tokenizer and the size of the model's window, but runs nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
)

from ..arguments import shown
from ..engine.model_facts import context_length, eos_ids, execution_device, num_input_ids, vocab_size
from ..engine.request import Request
from ..engine.rules import DecodingRules
from ..logits_process.bias_and_masks import UndecodableMask
from .chat_template import ChatTemplate
from .detokenizer import TextAssembler
from .job import Job
from .parameter_checks import check_characters
from .prompt_shapes import entries_of, listed_prompts
from .request_error import CONTEXT_LENGTH_EXCEEDED, RequestError, RequestTypeError, refused
from .sampling_params import DEFAULT_BUDGET, DEFAULT_PARAMS, TEMPLATE_FIELDS, SamplingParams, mixed_seed

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, ids, or chat messages
Params = SamplingParams | Iterable[SamplingParams]


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
        longest_row (`Callable[[int], int | None]`, *optional*):
            The most tokens that a prompt of a length and its text can have together, for reasons besides the window.
            It bounds budgets that nobody gave.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        truncate_prompt: str | None = None,
        mask_undecodable: bool = True,
        longest_row: Callable[[int], int | None] | None = None,
    ):
        if truncate_prompt not in (None, "left"):
            raise ValueError(f'`truncate_prompt` has to be None or "left", but is {truncate_prompt!r}.')
        if not isinstance(mask_undecodable, bool):
            raise TypeError(f"`mask_undecodable` has to be a bool, but is {mask_undecodable!r}.")
        self.model = model
        self.tokenizer = tokenizer
        self.truncate_prompt = truncate_prompt
        self.eos_token_ids = eos_ids_of(model, tokenizer)
        self.window = context_length(model)
        self.masks: list[LogitsProcessor] = []
        self.vocab_size = vocab_size(model)
        self._chat = ChatTemplate(tokenizer)
        self._longest_row = longest_row
        if mask_undecodable:
            self.masks = undecodable_masks(model, tokenizer, self.eos_token_ids)

    def all_jobs(self, prompts: Iterable[Prompt], params: Params) -> list[list[Job]]:
        """
        The jobs of each of many prompts, `n` for each.

        Args:
            prompts (`Iterable`):
                Prompts in any order-keeping container: a list, an array or tensor of ids, a column of a table.
            params ([`SamplingParams`] or an iterable of them):
                For all prompts, or one for each.

        Raises:
            `TypeError` or `ValueError`: for a single prompt in place of many, and for `params` that are none or not
                as many.
        """
        entries = listed_prompts(prompts)
        if isinstance(params, SamplingParams):
            each: list[Any] = [params] * len(entries)
        elif isinstance(params, (str, bytes, Mapping)) or not isinstance(params, Iterable):
            raise RequestTypeError(f"`params` has to be `SamplingParams` or a list of them, but is {shown(params)}.")
        else:
            each = list(params)
        if len(each) != len(entries):
            raise RequestError(f"`params` has to hold one entry per prompt, {len(entries)}, but holds {len(each)}.")
        return [self.jobs(prompt, own, index) for index, (prompt, own) in enumerate(zip(entries, each))]

    def jobs(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> list[Job]:
        """The jobs of one prompt, one per sample; a single one with the error if it is refused."""
        text = prompt if isinstance(prompt, str) else ""
        try:
            if not isinstance(params, SamplingParams):
                raise RequestTypeError(
                    f"`params` of prompt {index} has to be `SamplingParams`, but is {shown(params)}."
                )
            self._check_named_ids(params)
            text, whole_ids = self.encode(prompt, params, index)
            prompt_ids, budget = self._fit(whole_ids, params)
            if len(prompt_ids) < len(whole_ids):
                text = self.tokenizer.decode(prompt_ids)
            return self._samples(text, prompt_ids, budget, params, index)
        except (ValueError, TypeError) as error:
            return [Job(text, None, index=index, error=error)]

    def encode(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS, index: int = 0) -> tuple[str, list[int]]:
        """
        A prompt as the model sees it, as text and as ids.

        Args:
            prompt (`str`, `Iterable[int]` or `Iterable[Mapping]`):
                Text, ids, or chat messages.
            params ([`SamplingParams`], *optional*):
                What the chat template is told.
            index (`int`, *optional*, defaults to 0):
                The prompt's number, for errors.

        Raises:
            [`RequestError`]: for what is none of these, or cannot be encoded.
        """
        entries = prompt if isinstance(prompt, str) else entries_of(prompt, index)
        if isinstance(entries, list) and entries and all(isinstance(entry, Mapping) for entry in entries):
            text = self._chat.render(entries, **params.template_settings())
            return text, self._ids_of(text, index, add_special_tokens=False)
        for name in TEMPLATE_FIELDS:
            if getattr(params, name):
                raise RequestError(
                    f"`{name}` is for the chat template, but prompt {index} is no list of messages.", param=name
                )
        if isinstance(entries, str):
            return entries, self._ids_of(entries, index)
        ids = self._checked_ids(entries, index)
        return self.tokenizer.decode(ids), ids

    def _ids_of(self, text: str, index: int, **settings: bool) -> list[int]:
        try:
            check_characters(f"Prompt {index}", [text])
        except ValueError as error:
            raise refused(error, "prompt") from None
        return self._checked_ids(self.tokenizer(text, **settings)["input_ids"], index)

    def _checked_ids(self, ids: list[int], index: int) -> list[int]:
        if not ids:
            raise RequestError(
                f"Prompt {index} is empty: decoding needs at least one token to start from.", param="prompt"
            )
        most = num_input_ids(self.model)
        if outside := [token_id for token_id in ids if not 0 <= token_id < most]:
            raise RequestError(
                f"Prompt {index} holds {shown(outside)}, but the model's vocabulary has {most} ids.", param="prompt"
            )
        return ids

    def _fit(self, prompt_ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """The prompt and the budget that fit into the window together."""
        if params.max_new_tokens is not None:
            return self._fitted(prompt_ids, params.max_new_tokens, "max_new_tokens"), params.max_new_tokens
        least, most = max(1, params.min_new_tokens), max(DEFAULT_BUDGET, params.min_new_tokens)
        if self.window is not None and len(prompt_ids) + least > self.window:
            room = max(least, min(most, self.window // 2)) if self.truncate_prompt is not None else least
            prompt_ids = self._fitted(prompt_ids, room, "min_new_tokens")
        longest = None if self._longest_row is None else self._longest_row(len(prompt_ids))
        rooms = [limit - len(prompt_ids) for limit in (self.window, longest) if limit is not None]
        return prompt_ids, max(least, min([most, *rooms]))

    def _fitted(self, prompt_ids: list[int], num_tokens: int, name: str) -> list[int]:
        """The prompt, or the end of it, that leaves room for so many tokens, which the field `name` asks for."""
        if self.window is None or len(prompt_ids) + num_tokens <= self.window:
            return prompt_ids
        room = self.window - num_tokens
        if self.truncate_prompt == "left" and room > 0:
            return prompt_ids[-room:]
        field = f" and `{name}` of {num_tokens}" if name == "max_new_tokens" or num_tokens > 1 else " and an answer"
        raise RequestError(
            f"A prompt of {len(prompt_ids)} tokens{field} exceed the model's {self.window} positions. Shorten one of "
            "them, or set `truncate_prompt='left'`.",
            CONTEXT_LENGTH_EXCEEDED,
            name if len(prompt_ids) < self.window and num_tokens > 1 else "prompt",
        )

    def _check_named_ids(self, params: SamplingParams) -> None:
        """Refuses ids that could never be biased or reached, and more log-probabilities than there are ids."""
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise RequestError(
                f"`logprobs` has to be at most the vocabulary's {self.vocab_size}, but is {params.logprobs}.",
                param="logprobs",
            )
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            if outside := [i for i in map(int, ids) if not 0 <= i < self.vocab_size]:
                raise RequestError(
                    f"`{name}` names {shown(outside)}, but the model's vocabulary has {self.vocab_size} ids.",
                    param=name,
                )

    def _samples(self, text: str, prompt_ids: list[int], budget: int, params: SamplingParams, index: int) -> list[Job]:
        """One job per sample. They share what remembers nothing of a row."""
        processors = params.logits_processor(
            len(prompt_ids), self.eos_token_ids, self.masks, execution_device(self.model)
        )
        end_ids = params.stop_ids(self.eos_token_ids)
        rules = DecodingRules(processors, eos_token_ids=end_ids, do_sample=not params.is_greedy)
        jobs = []
        for sample in range(params.n):
            assembler = TextAssembler(
                self.tokenizer, params.stop, prompt_ids, end_ids=end_ids, min_tokens=params.min_new_tokens
            )
            seed = None if params.seed is None else mixed_seed(params.seed, sample)
            request = Request(
                prompt_ids,
                budget,
                rules,
                seed,
                text=assembler,
                num_logprobs=params.logprobs,
                logprobs_mode=params.logprobs_mode,
            )
            jobs.append(Job(text, request, assembler, index, sample, wants_logprobs=params.logprobs is not None))
        return jobs


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
