"""Door one: `model.generate(..., assistant_model=draft)` on our loop.

`enable_speculation` swaps the instance's class for a subclass in which `_assisted_decoding` runs the [`Decoder`]. By
then `generate` has prepared processors, criteria and inputs, so what a user can ask of it works here too.
"""

from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode

from ..engine.request import Request
from ..engine.stats import DecodingStats
from .call import AssistedCall
from .choice import SpeculationSettings, drafts_its_own_way, make_drafter, reason_for_transformers

ModelT = TypeVar("ModelT")


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    What `generate(..., return_dict_in_generate=True)` returns: [`~transformers.generation.GenerateDecoderOnlyOutput`]
    and the run's statistics. `cache` is None: a slot cache cannot be continued by plain `generate`. After a row's end
    its `scores` and `logits` are 0 for the padding and -inf elsewhere.

    Attributes:
        speculation_stats ([`DecodingStats`], *optional*): the counts of the call, as in `model.speculation_stats`.
    """

    speculation_stats: DecodingStats | None = None


class SpeculationMixin(GenerationMixin):
    """The three methods of `GenerationMixin` that speculation overrides."""

    speculation_stats: DecodingStats | None = None

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        self.__dict__.pop("speculation_stats", None)
        settings = SpeculationSettings.of_call(kwargs, generation_config, self.generation_config)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        prepared._speculation = settings
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: dict
    ) -> None:
        assistant_model = generation_mode_kwargs.get("assistant_model")
        is_drafter = drafts_its_own_way(assistant_model) or hasattr(assistant_model, "generate")
        if assistant_model is not None and not is_drafter:
            raise TypeError(
                f"`assistant_model` has to be a causal language model or a `Drafter`, but is {assistant_model!r}."
            )
        has_drafter = (
            "assistant_model" in generation_mode_kwargs or generation_config.prompt_lookup_num_tokens is not None
        )
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if has_drafter and not is_assisted:
            raise ValueError(
                "Speculative decoding knows greedy search and sampling, but the settings ask for "
                f"{generation_mode.value!r}. Drop the drafter or set `num_beams=1`."
            )
        settings: SpeculationSettings = generation_config._speculation
        if not is_assisted and (settings.on_round is not None or settings.trace):
            raise ValueError("`on_round` and `trace` need `assistant_model` or `prompt_lookup_num_tokens`.")
        has_own_tokenizer = "assistant_tokenizer" in generation_mode_kwargs
        reason = reason_for_transformers(assistant_model, generation_config, has_own_tokenizer)
        if not is_assisted or reason is not None:
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        inputs_tensor: Tensor | None = None,
        assistant_model: PreTrainedModel | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> SpeculativeDecoderOnlyOutput | Tensor:
        settings: SpeculationSettings = generation_config._speculation
        call = AssistedCall(self, input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs)
        if call.is_handed_over(assistant_model, assistant_tokenizer, synced_gpus, settings):
            del generation_config._speculation  # transformers copies the configuration for its drafters
            return super()._assisted_decoding(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"`streamer` works with one row at a time, but the batch has {len(input_ids)} rows.")
        drafter = make_drafter(self, assistant_model, generation_config, settings, tokenizer)
        requests = call.make_requests()
        decoder = call.make_decoder(drafter, settings)

        def has_unfinished_peers(is_busy: bool) -> bool:
            return self._has_unfinished_sequences(not is_busy, synced_gpus, self.device)

        num_streamed = 0
        for _ in decoder.run(requests, has_unfinished_peers):
            if streamer is not None:
                for token_id in requests[0].token_ids[num_streamed:]:
                    streamer.put(torch.tensor([token_id]))
                num_streamed = len(requests[0].token_ids)
        if streamer is not None:
            streamer.end()
        self.speculation_stats = decoder.stats
        return _output(call, requests, decoder.stats)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        base = type(self).__mro__[2]
        if _subclasses.get(base) is not type(self):  # another library has made a class of ours
            return super().__reduce_ex__(protocol)
        return _rebuild, (base,), self.__dict__.copy()


def _output(
    call: AssistedCall, requests: list[Request], stats: DecodingStats
) -> SpeculativeDecoderOnlyOutput | Tensor:
    sequences, config = call.sequences(requests), call.config
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeDecoderOnlyOutput(
        sequences=sequences,
        scores=call.stacked([request.scores for request in requests]) if config.output_scores else None,
        logits=call.stacked([request.logits for request in requests]) if config.output_logits else None,
        speculation_stats=stats,
    )


_subclasses: dict[type, type] = {}


def _speculative_class(base: type) -> type:
    if base not in _subclasses:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _subclasses[base] = type(base.__name__, (SpeculationMixin, base), names)
    return _subclasses[base]


def _rebuild(base: type) -> PreTrainedModel:
    return object.__new__(_speculative_class(base))


def enable_speculation(model: ModelT) -> ModelT:
    """
    Makes `model.generate(..., assistant_model=draft)` and `prompt_lookup_num_tokens=` run on this package's loop: at
    any batch size, with left padding, processors, stop strings and sampling, exactly.

    The model stays the same object and of its own class; saving, copying and pickling work as before, and `generate`
    without a drafter is untouched. Calling this twice is calling it once.

    With a drafter `generate` also takes `on_round` and `trace=True`, and leaves its counts in
    `model.speculation_stats`, a [`DecodingStats`], which is None after any other call and where transformers' own loop
    served. `on_round(rows, candidates, verification)` is called after every verification, before anything is
    committed, with [`Rows`], [`Candidates`] and [`Verification`]. Instead of a model, `assistant_model` may be a
    [`Drafter`].

    Args:
        model ([`~transformers.PreTrainedModel`], `PeftModel` or compiled module):
            A causal language model; wrappers are looked through.

    Returns:
        The object that was given.

    Raises:
        `TypeError`: if it holds no transformers model that can generate.
        `ValueError`: if it is a PEFT model that learns a prompt.
    """
    target = unwrap(model)
    if not isinstance(target, SpeculationMixin):
        target.__class__ = _speculative_class(type(target))
    return model


def disable_speculation(model: ModelT) -> ModelT:
    """
    Gives the model its own class back. Does nothing if speculation is not enabled.

    Args:
        model ([`~transformers.PreTrainedModel`], `PeftModel` or compiled module):
            What was given to [`enable_speculation`].

    Returns:
        The object that was given.

    Raises:
        `ValueError`: if another library has changed the class since.
    """
    target = unwrap(model)
    base = type(target).__mro__[2] if len(type(target).__mro__) > 2 else object
    if _subclasses.get(base) is type(target):
        target.__class__ = base
        target.__dict__.pop("speculation_stats", None)
    elif isinstance(target, SpeculationMixin):
        raise ValueError(
            f"The model's class was changed to {type(target).__name__!r} after `enable_speculation`; undo that first."
        )
    return model


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a compiled module or a `PeftModel`."""
    if isinstance(model, OptimizedModule):
        return unwrap(model._orig_mod)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise ValueError(
                "PEFT models that learn a prompt build their inputs where speculation cannot follow. Use LoRA or "
                "another method that changes layers."
            )
        return unwrap(model.get_base_model())
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(f"Speculation needs a transformers model that can generate, but got {type(model).__name__!r}.")
    return model
