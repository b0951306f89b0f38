"""One assisted call of `generate` on the loop: its requests, its decoder, and what it returns."""

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..engine.decoder import Decoder
from ..engine.drafter import Drafter
from ..engine.limits import CacheLimits
from ..engine.model_facts import eos_ids, execution_device, vocab_size
from ..engine.request import PaddedBatch, Request
from ..engine.rules import DecodingRules
from .route import Asked, Inputs


class AssistedCall:
    """
    A call that the loop serves.

    Args:
        model ([`~transformers.PreTrainedModel`]): the target.
        inputs ([`Inputs`]): what `generate` has prepared.
        generation_config ([`~transformers.GenerationConfig`]): with all defaults filled in.
    """

    def __init__(self, model: PreTrainedModel, inputs: Inputs, generation_config: GenerationConfig):
        self.model = model
        self.inputs = inputs
        self.config = generation_config
        self.input_ids = inputs.input_ids

    def make_decoder(self, drafter: Drafter, asked: Asked) -> Decoder:
        """A decoder with a slot for every row."""
        capacity = None
        if self.config.cache_implementation == "static":
            capacity = self.input_ids.shape[1] + self._max_new_tokens()
        limits = CacheLimits(capacity)
        return Decoder(self.model, drafter, len(self.input_ids), limits, asked.on_round, asked.trace)

    def _max_new_tokens(self) -> int:
        limits = [c.max_length for c in self.inputs.stopping_criteria if type(c) is MaxLengthCriteria]
        budget = min(limits) - self.input_ids.shape[1]
        if isinstance(budget, int) and budget < 1:
            raise ValueError(
                f"The prompt has {self.input_ids.shape[1]} columns, but `max_length` allows {min(limits)}; raise it."
            )
        if not isinstance(budget, int):
            raise TypeError(f"`max_new_tokens` (or `max_length`) has to be an int, but is {budget!r}.")
        return budget

    def make_requests(self) -> list[Request]:
        """
        One request per row, all on the padded batch that `generate` was given.

        Raises:
            `ValueError`: for right padding, an empty row, ids outside the vocabulary, or a batch without padding id.
        """
        mask = self.inputs.attention_mask
        if bool((mask[:, -1] == 0).any()):
            raise ValueError(
                "The attention mask ends in zeros, so the batch is right-padded or has an empty row. Pad on the left: "
                "`tokenizer.padding_side = 'left'`."
            )
        max_new_tokens = self._max_new_tokens()
        rules = self._rules()
        is_filled = len(self.input_ids) > 1 and bool(rules.eos_token_ids or rules.stopping_criteria)
        pad_token_id = self._pad_token_id(is_needed=is_filled)
        batch = PaddedBatch(self.input_ids.to(execution_device(self.model)), max_new_tokens, pad_token_id)
        return [
            Request(
                ids[kept].tolist(),
                max_new_tokens,
                rules,
                batch=batch,
                batch_row=row,
                keep_scores=bool(self.config.output_scores and self.config.return_dict_in_generate),
                keep_logits=bool(self.config.output_logits and self.config.return_dict_in_generate),
            )
            for row, (ids, kept) in enumerate(zip(self.input_ids, mask != 0))
        ]

    def _rules(self) -> DecodingRules:
        criteria = self.inputs.stopping_criteria
        return DecodingRules(
            logits_processor=self.inputs.logits_processor,
            stopping_criteria=StoppingCriteriaList(
                c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
            ),
            eos_token_ids=self._eos_token_ids(),
            do_sample=bool(self.config.do_sample),
        )

    def _eos_token_ids(self) -> frozenset[int]:
        criteria = [c for c in self.inputs.stopping_criteria if type(c) is EosTokenCriteria]
        ids = eos_ids([i for criterion in criteria for i in criterion.eos_token_id.flatten().tolist()])
        if outside := [i for i in sorted(ids) if not 0 <= i < vocab_size(self.model)]:
            raise ValueError(
                f"`eos_token_id` {outside} is outside the vocabulary of {vocab_size(self.model)} ids and can never be "
                "reached. Leave it out, or pass -1 for no end."
            )
        return ids

    def _pad_token_id(self, is_needed: bool) -> int:
        """The id that fills rows after their end."""
        pad_token_id = None if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)
        if pad_token_id is None and is_needed:
            raise ValueError(
                "A batch needs something to fill rows that end early: set `pad_token_id` or `eos_token_id` in the "
                "generation config."
            )
        is_known = pad_token_id is not None and 0 <= pad_token_id < vocab_size(self.model)
        if not is_known and is_needed:
            raise ValueError(
                f"`pad_token_id` {pad_token_id} is outside the vocabulary of {vocab_size(self.model)} ids; rows that "
                "end early cannot be filled with it. Set one of the tokenizer's."
            )
        return 0 if pad_token_id is None or not is_known else pad_token_id

    def sequences(self, requests: list[Request]) -> Tensor:
        """Prompts and generated tokens, padded to the longest row, on the device of the input."""
        longest = max(len(request.token_ids) for request in requests)
        pad_token_id = requests[0].batch.pad_token_id
        generated = [r.token_ids + [pad_token_id] * (longest - len(r.token_ids)) for r in requests]
        return torch.cat([self.input_ids, torch.tensor(generated, device=self.input_ids.device)], dim=1)

    def stacked(self, rows: list[list[Tensor]], pad_token_id: int) -> tuple[Tensor, ...]:
        """The scores of all rows by step, each `(rows, vocab)`; finished rows get 0 at pad and -inf elsewhere."""
        sample = next(scores[0] for scores in rows if scores)
        finished = torch.full_like(sample, -torch.inf)
        finished[pad_token_id] = 0.0
        longest = max(len(scores) for scores in rows)
        device = self.input_ids.device
        return tuple(
            torch.stack([scores[step] if step < len(scores) else finished for scores in rows]).to(device)
            for step in range(longest)
        )
