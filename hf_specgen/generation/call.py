"""One assisted call of `generate`: what it asks for, whether the loop can serve it, and its requests.

Refusals happen here, before the first forward pass.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..engine.decoder import Decoder
from ..engine.drafter import Drafter
from ..engine.model_facts import execution_device
from ..engine.request import PaddedBatch, Request
from ..engine.rules import DecodingRules
from ..engine.scheduler import CacheLimits
from ..engine.support import OWN_WINDOW_TYPES, is_sharded, unsupported_reason
from ..layers.slot_cache import SERVED_LAYER_TYPES
from .choice import SpeculationSettings, drafts_its_own_way, reason_for_transformers

MODEL_KWARGS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
SIMPLE_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class AssistedCall:
    """What `generate` has prepared when it comes to assisted decoding."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        model_kwargs: dict[str, Any],
    ):
        self.model = model
        self.input_ids = input_ids
        self.config = generation_config
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.model_kwargs = model_kwargs

    def is_handed_over(
        self, assistant_model: Any, assistant_tokenizer: Any, synced_gpus: bool, settings: SpeculationSettings
    ) -> bool:
        """
        Whether transformers' own loop serves this call instead of ours.

        Raises:
            `ValueError`: if neither does, naming the reason.
        """
        self._refuse_wrong_everywhere()
        reason = self._reason_for_transformers(assistant_model, assistant_tokenizer)
        if reason is None:
            if synced_gpus and is_sharded(assistant_model):
                raise ValueError(
                    "Under `synced_gpus` the draft model cannot be sharded, since ranks draft different numbers of "
                    "tokens. Keep a whole copy of it on every rank."
                )
            return False
        hint = "set it in the draft's `generation_config`"
        settings.refuse_said({"max_matching_ngram_size"}, f"transformers' own loop serves this ({reason}); {hint}")
        has_hook = settings.on_round is not None or settings.trace
        is_simple = all(type(criterion) in SIMPLE_CRITERIA for criterion in self.stopping_criteria)
        models = [self.model, *([assistant_model] if isinstance(assistant_model, PreTrainedModel) else [])]
        is_served = all(map(is_served_by_transformers, models)) and not isinstance(assistant_model, Drafter)
        if len(self.input_ids) > 1 or not is_simple or synced_gpus or has_hook or not is_served:
            raise ValueError(
                f"Speculative decoding cannot serve this call: {reason}. transformers' own loop "
                + (
                    "could, but one row only, without stop strings, other criteria, `synced_gpus` or hooks."
                    if is_served
                    else "cannot either. Call `generate` without a drafter."
                )
            )
        return True

    def _refuse_wrong_everywhere(self) -> None:
        """What transformers' own loop would get wrong as well."""
        problem = None
        cache = self.model_kwargs.get("cache")
        if self.model_kwargs.get("inputs_embeds") is not None:
            problem = "`inputs_embeds` without token ids leaves nothing to draft from; pass `input_ids`"
        elif self.input_ids.shape[1] == 0:
            problem = "the prompt is empty"
        elif self.model_kwargs.get("use_cache") is False:
            problem = "`use_cache=False` leaves nothing to verify against"
        elif self.config.cache_implementation == "quantized":
            problem = "a quantized cache cannot be rolled back"
        elif self._is_filled(cache):
            problem = "the given `cache` is not empty; pass the whole conversation as `input_ids` instead"
        elif self.config.prefill_chunk_size is not None:
            problem = "`prefill_chunk_size` is not supported"
        elif stateful := [p for p in self.logits_processor if isinstance(p, STATEFUL_PROCESSORS)]:
            problem = (
                f"`{type(stateful[0]).__name__}` (`guidance_scale` or SynthID watermarking) keeps a state from call "
                "to call, which refused candidates would spoil"
            )
        if problem is not None:
            raise ValueError(f"Speculative decoding cannot serve this call: {problem}.")

    def _is_filled(self, cache: Any) -> bool:
        if cache is None or self.model.config.is_encoder_decoder or self.model._is_stateful:
            return False
        return cache.get_seq_length() > 0

    def _reason_for_transformers(self, assistant_model: Any, assistant_tokenizer: Any) -> str | None:
        if reason := unsupported_reason(self.model):
            return reason
        if reason := reason_for_transformers(assistant_model, self.config, assistant_tokenizer is not None):
            return reason
        cache = self.model_kwargs.get("cache")
        if cache is not None and hasattr(cache, "_is_user_defined"):
            return "a `cache` is given"
        if self.config.cache_implementation not in (None, "dynamic", "static"):
            return f"`cache_implementation` is {self.config.cache_implementation!r}"
        if self.config.assistant_ensemble_weight is not None:
            return "`assistant_ensemble_weight` changes the output law"
        if self.config.output_attentions or self.config.output_hidden_states:
            return "`output_attentions` and `output_hidden_states` are not collected"
        given = {name for name, value in self.model_kwargs.items() if value is not None}
        if extra := given - MODEL_KWARGS:
            return f"the model inputs {sorted(extra)} are not known to the loop"
        if self._has_holes() and "sliding_attention" in get_layer_types_and_kwargs(self._text_config())[0]:
            return "the attention mask has zeros inside a row, which sliding windows count"
        if not self._has_default_positions():
            return "`position_ids` are not those that the attention mask implies"
        if isinstance(assistant_model, PreTrainedModel) and not drafts_its_own_way(assistant_model):
            reason = unsupported_reason(assistant_model)
            return None if reason is None else f"as a draft, {reason}"
        return None

    def _mask(self) -> Tensor:
        mask = self.model_kwargs.get("attention_mask")
        return torch.ones_like(self.input_ids) if mask is None else mask.to(self.input_ids.device)

    def _text_config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config(decoder=True)

    def _has_holes(self) -> bool:
        mask = self._mask() != 0
        return bool((mask[:, :-1] & ~mask[:, 1:]).any())

    def _has_default_positions(self) -> bool:
        position_ids = self.model_kwargs.get("position_ids")
        if position_ids is None:
            return True
        mask = self._mask()
        expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        position_ids = position_ids.to(mask.device).masked_fill(mask == 0, 0)
        return position_ids.shape[-1] == mask.shape[-1] and bool((position_ids == expected).all())

    def make_decoder(self, drafter: Drafter, settings: SpeculationSettings) -> Decoder:
        """A decoder with a slot for every row."""
        capacity = None
        if self.config.cache_implementation == "static":
            capacity = self.input_ids.shape[1] + self._max_new_tokens()
        limits = CacheLimits(capacity)
        return Decoder(self.model, drafter, len(self.input_ids), limits, settings.on_round, settings.trace)

    def _max_new_tokens(self) -> int:
        limits = [c.max_length for c in self.stopping_criteria if type(c) is MaxLengthCriteria]
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
        mask = self._mask()
        if bool((mask[:, -1] == 0).any()):
            raise ValueError(
                "The attention mask ends in zeros, so the batch is right-padded or has an empty row. Pad on the left: "
                "`tokenizer.padding_side = 'left'`."
            )
        max_new_tokens = self._max_new_tokens()
        rules = self._rules()
        batch = PaddedBatch(self.input_ids.to(execution_device(self.model)), max_new_tokens, self._pad_token_id())
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
        vocab_size = self.model.config.get_text_config().vocab_size
        eos_token_ids: set[int] = set()
        for criterion in self.stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
        if outside := [i for i in eos_token_ids if not 0 <= i < vocab_size]:
            raise ValueError(
                f"`eos_token_id` {outside} is outside the vocabulary of {vocab_size} ids and can never be reached."
            )
        others = [c for c in self.stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        return DecodingRules(
            logits_processor=self.logits_processor,
            stopping_criteria=StoppingCriteriaList(others),
            eos_token_ids=frozenset(eos_token_ids),
            do_sample=bool(self.config.do_sample),
        )

    def _pad_token_id(self) -> int:
        """What fills rows that end early, 0 where a single row needs no filling."""
        vocab_size = self.model.config.get_text_config().vocab_size
        pad_token_id = self.config._pad_token_tensor
        if pad_token_id is None and len(self.input_ids) > 1:
            raise ValueError(
                "A batch needs something to fill rows that end early: set `pad_token_id` or `eos_token_id` in the "
                "generation config."
            )
        if len(self.input_ids) > 1 and not 0 <= int(pad_token_id) < vocab_size:
            raise ValueError(
                f"`pad_token_id` {int(pad_token_id)} is outside the vocabulary of {vocab_size} ids; rows that end "
                "early cannot be filled with it."
            )
        return 0 if pad_token_id is None else int(pad_token_id)

    def sequences(self, requests: list[Request]) -> Tensor:
        """Prompts and generated tokens, padded to the longest row, on the device of the input."""
        longest = max(len(request.token_ids) for request in requests)
        pad_token_id = requests[0].batch.pad_token_id
        generated = [r.token_ids + [pad_token_id] * (longest - len(r.token_ids)) for r in requests]
        return torch.cat([self.input_ids, torch.tensor(generated, device=self.input_ids.device)], dim=1)

    def stacked(self, rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
        """Per step the scores of all rows, of shape `(rows, vocab)`; ended rows choose the padding for certain."""
        sample = next(scores[0] for scores in rows if scores)
        ended = torch.full_like(sample, -torch.inf)
        if len(rows) > 1:  # a single row needs no padding, and its id may lie outside the vocabulary
            ended[self._pad_token_id()] = 0.0
        longest = max(len(scores) for scores in rows)
        device = self.input_ids.device
        return tuple(
            torch.stack([scores[step] if step < len(scores) else ended for scores in rows]).to(device)
            for step in range(longest)
        )


def is_served_by_transformers(model: PreTrainedModel) -> bool:
    """Whether transformers' own assisted decoding is right for a model that `unsupported_reason` names."""
    config = model.config.to_dict()
    has_alibi = config["model_type"] in ("bloom", "mpt") or bool(config.get("alibi"))
    if model.config.is_encoder_decoder or has_alibi or model.config.model_type in OWN_WINDOW_TYPES:
        return True
    if model._is_stateful:
        return False
    kinds = set(get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0])
    return kinds <= SERVED_LAYER_TYPES | {"chunked_attention"}
