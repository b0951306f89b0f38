"""Penalties on repeated tokens: repetition, frequency and presence, fused and one by one.

Stateless for any `model.generate`, and incremental for a loop that judges several drafted positions at once. Tensors
only: knows no model, tokenizer or loop.
"""

from collections.abc import Collection, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..arguments import checked_integer, checked_number
from .token_counts import TokenCounts, counts_in_block, has_begun, is_in_vocabulary

FP32 = torch.finfo(torch.float32)


class CountingOptions(TypedDict, total=False):
    """What the penalties count; explained in [`TokenPenalties`]."""

    scope: str
    prompt_length: int | None
    pad_token_id: int | None
    exempt_ids: Collection[int]


class TokenPenalties(LogitsProcessor):
    r"""
    Penalties on tokens that have occurred, in one pass. First the repetition penalty of CTRL (Keskar et al. 2019,
    https://arxiv.org/abs/1909.05858): a positive score is divided by it, a negative one multiplied, however often the
    token occurs. Then OpenAI's (API guide, "Frequency and presence penalties"):
    `score - count * frequency_penalty - (count > 0) * presence_penalty`.

    Computed in fp32 at least. A finite score never becomes NaN or +inf, and an infinite one stays as it is.

    Args:
        repetition_penalty (`float`, *optional*, defaults to 1.0):
            Above 1 discourages tokens that occur, below 1 encourages them.
        frequency_penalty (`float`, *optional*, defaults to 0.0):
            Subtracted once per occurrence.
        presence_penalty (`float`, *optional*, defaults to 0.0):
            Subtracted once if the token occurs.
        scope (`str`, *optional*, defaults to `"all"`):
            `"all"` counts the prompt and the generated tokens, `"generated"` the generated ones only.
        prompt_length (`int`, *optional*):
            Columns of the padded prompt batch. `"generated"` needs it wherever whole rows are given (plain
            `model.generate`); `make_counts` does not.
        pad_token_id (`int`, *optional*):
            The leading run of this id in a row is never counted, even where a real prompt begins with it. Without it
            every id counts.
        exempt_ids (`Collection[int]`, *optional*, defaults to `()`):
            Ids that are never counted, such as the markers of a chat template.

    Ids that are negative or outside the vocabulary of the scores are ignored.

    Raises:
        `ValueError`, `TypeError`: for a penalty that is no finite number (the repetition penalty: no positive one),
        an unknown scope, or ids that are no integers.
    """

    def __init__(
        self,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        *,
        scope: str = "all",
        prompt_length: int | None = None,
        pad_token_id: int | None = None,
        exempt_ids: Collection[int] = (),
    ):
        self.repetition_penalty = checked_number("repetition_penalty", repetition_penalty)
        if self.repetition_penalty < FP32.tiny:
            raise ValueError(
                f"`repetition_penalty` has to be a positive number, but is {repetition_penalty!r}. Pass 1.0 for none."
            )
        self.frequency_penalty = checked_number("frequency_penalty", frequency_penalty)
        self.presence_penalty = checked_number("presence_penalty", presence_penalty)
        if scope not in ("all", "generated"):
            raise ValueError(f'`scope` has to be "all" or "generated", but is {scope!r}.')
        self.scope = scope
        self.prompt_length = None if prompt_length is None else checked_integer("prompt_length", prompt_length)
        if self.prompt_length is not None and self.prompt_length < 0:
            raise ValueError(f"`prompt_length` has to be at least 0, but is {prompt_length!r}.")
        self.pad_token_id = None if pad_token_id is None else checked_integer("pad_token_id", pad_token_id)
        self._can_raise = self.repetition_penalty < 1.0 or min(self.frequency_penalty, self.presence_penalty) < 0.0
        self.exempt_ids = tuple(checked_integer("exempt_ids", token) for token in exempt_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """
        Returns the penalised scores as a new tensor.

        Args:
            input_ids (`torch.LongTensor` of shape `(rows, length)`): Prompt and generated tokens.
            scores (`torch.FloatTensor` of shape `(rows, vocab)`): The scores of the next token.
        """
        vocab_size = scores.shape[-1]
        is_counted = is_in_vocabulary(input_ids, vocab_size)
        if self.pad_token_id is not None:
            is_counted &= has_begun(input_ids, self.pad_token_id)
        if self.scope == "generated":
            if self.prompt_length is None:
                raise ValueError(
                    '`prompt_length` has to be given for `scope="generated"`, but is None. Pass the number of columns '
                    'of the padded prompt batch, or count the prompt too with `scope="all"`.'
                )
            is_counted[:, : self.prompt_length] = False
        # A last column takes in what does not count.
        ids = input_ids.where(is_counted, vocab_size)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        table = torch.empty(len(scores), vocab_size + 1, dtype=dtype, device=scores.device)
        penalised = table[:, :vocab_size].copy_(scores)
        raw = table.gather(1, ids)
        counts = torch.ones_like(raw[:1, :1])
        if self.frequency_penalty != 0.0:
            # Counted in the result itself, where the final values overwrite the counts: a second table of this size
            # would take as long as everything else.
            table.scatter_(1, ids, torch.zeros_like(raw)).scatter_add_(1, ids, torch.ones_like(raw))
            counts = table.gather(1, ids)
        table.scatter_(1, ids, self._penalize(raw, self._effect(counts), largest=torch.finfo(scores.dtype).max))
        if exempt_ids := [token for token in self.exempt_ids if 0 <= token < vocab_size]:
            penalised[:, exempt_ids] = scores[:, exempt_ids].to(dtype)
        return penalised.to(scores.dtype)

    def make_counts(self, prompt_ids: Tensor) -> TokenCounts:
        """
        The counts that `apply_` needs, to be kept up with `TokenCounts.add`. `scope="generated"` starts from nothing,
        or from what stands behind `prompt_length`.

        Args:
            prompt_ids (`torch.LongTensor` of shape `(rows, columns)`): The prompts with their left padding.
        """
        counts = TokenCounts(
            prompt_ids,
            count_prompt=self.scope == "all",
            pad_token_id=self.pad_token_id,
            exempt_ids=self.exempt_ids,
        )
        if self.scope == "generated" and self.prompt_length is not None:
            for row, token_ids in enumerate(prompt_ids[:, self.prompt_length :].tolist()):
                counts.add(row, token_ids)
        return counts

    def apply_(
        self, scores: Tensor, counts: TokenCounts, rows: Sequence[int], candidate_ids: Tensor, first: int = 0
    ) -> Tensor:
        """
        Penalises `scores` in place, at several positions per row, each as `__call__` would on the whole row up to it.
        Candidates count as if they were committed, and nothing is remembered. Never waits for the device.

        Args:
            scores (`torch.FloatTensor` of shape `(rows, positions, vocab)`):
                The caller's own copy, in fp32.
            counts (`TokenCounts`):
                From `make_counts`, with all committed tokens.
            rows (`Sequence[int]`):
                Which row of `counts` each row of `scores` belongs to.
            candidate_ids (`torch.LongTensor` of shape `(rows, k)`):
                Drafted tokens. Position `j` is judged after the first `first + j` of them.
            first (`int`, *optional*, defaults to 0):
                How many candidates come before position 0.

        Returns:
            `torch.FloatTensor`: `scores` itself.
        """
        num_positions, vocab_size = scores.shape[1:]
        num_candidates = first + num_positions - 1
        assert candidate_ids.shape[1] >= num_candidates, "Every position needs the candidates before it."
        assert len(rows) == len(scores), "Every row of scores needs its row of counts."
        assert scores.dtype == torch.float32, "Scores are penalised in place in fp32."
        ids, seen = counts.select(rows, vocab_size)
        effect = self._effect(seen)
        candidate_ids = candidate_ids[:, :num_candidates]
        is_counted = counts.is_counted(rows, candidate_ids, vocab_size)
        candidate_ids = candidate_ids.where(is_counted, 0)
        index = candidate_ids[:, None].expand(-1, num_positions, -1)
        raw = scores.gather(2, index)
        committed = seen[:, :0]
        # One position at a time: what is gathered is then still in the CPU's cache when it is written back.
        for position, table in enumerate(scores.unbind(1)):
            values = self._penalize(table.gather(1, ids), effect)
            if position == 0 and num_candidates > 0:
                # The candidates' committed counts, looked up in the scores themselves: all that is written here gets
                # its value below. Comparing them with all of `ids` takes four times as long.
                committed = table.scatter_(1, candidate_ids, 0.0).scatter_(1, ids, seen).gather(1, candidate_ids)
            table.scatter_(1, ids, values)
        if num_candidates > 0:
            drafted = counts_in_block(candidate_ids, is_counted, first)
            scores.scatter_(2, index, self._penalize(raw, self._effect(committed[:, None] + drafted)))
        return scores

    def _effect(self, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What `counts` occurrences do to a score: a factor or divisor, and what is subtracted then. None: nothing."""
        occurs = counts.clamp(max=1)
        factor = penalty = None
        if self.repetition_penalty != 1.0:
            factor = occurs * self.repetition_penalty + (1 - occurs)
        if self.frequency_penalty != 0.0 or self.presence_penalty != 0.0:
            penalty = counts * self.frequency_penalty + occurs * self.presence_penalty
            penalty.clamp_(-FP32.max, FP32.max)
        return factor, penalty

    def _penalize(
        self, scores: Tensor, effect: tuple[Tensor | None, Tensor | None], largest: float = FP32.max
    ) -> Tensor:
        """The penalised scores; overwrites `scores`. Count 0 returns the very score."""
        factor, penalty = effect
        is_infinite = scores == float("inf") if self._can_raise else None
        if factor is not None:
            # "Divide if positive, multiply if negative" is the smaller of the two above 1, else the larger.
            choose = torch.minimum if self.repetition_penalty > 1.0 else torch.maximum
            scores = choose(scores * factor, scores.div_(factor))
        if penalty is not None:
            scores.sub_(penalty)
        return scores if is_infinite is None else scores.clamp_(max=largest).masked_fill_(is_infinite, float("inf"))

    def __repr__(self) -> str:
        return represent(self)


class RepetitionPenalty(TokenPenalties):
    """
    [`TokenPenalties`] with `repetition_penalty=penalty` alone.

    Args:
        penalty (`float`):
            Above 1 discourages tokens that occur, below 1 encourages them.
        options (*optional*):
            `scope`, `prompt_length`, `pad_token_id` and `exempt_ids`, as in [`TokenPenalties`].
    """

    def __init__(self, penalty: float, **options: Unpack[CountingOptions]):
        super().__init__(repetition_penalty=penalty, **options)


class FrequencyPenalty(TokenPenalties):
    """
    [`TokenPenalties`] with `frequency_penalty=penalty` alone.

    Args:
        penalty (`float`):
            Subtracted once per occurrence.
        options (*optional*):
            `scope`, `prompt_length`, `pad_token_id` and `exempt_ids`, as in [`TokenPenalties`].
    """

    def __init__(self, penalty: float, **options: Unpack[CountingOptions]):
        super().__init__(frequency_penalty=penalty, **options)


class PresencePenalty(TokenPenalties):
    """
    [`TokenPenalties`] with `presence_penalty=penalty` alone.

    Args:
        penalty (`float`):
            Subtracted once if the token occurs.
        options (*optional*):
            `scope`, `prompt_length`, `pad_token_id` and `exempt_ids`, as in [`TokenPenalties`].
    """

    def __init__(self, penalty: float, **options: Unpack[CountingOptions]):
        super().__init__(presence_penalty=penalty, **options)


def represent(processor: LogitsProcessor) -> str:
    """The processor's class and settings, for `__repr__`."""
    settings = (f"{name}={value!r}" for name, value in vars(processor).items() if not name.startswith("_"))
    return f"{type(processor).__name__}({', '.join(settings)})"
