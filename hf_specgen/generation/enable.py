"""How `generate` of a model comes to our loop, and back.

`enable_speculation` swaps the instance's class for a subclass in which `_assisted_decoding` runs the [`Decoder`]. By
then `generate` has prepared processors, criteria and inputs, so what a user can ask of it works here too.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode
from transformers.utils import logging

from ..engine.decoder import Decoder
from ..engine.request import Request
from ..engine.stats import DecodingStats
from .call import AssistedCall
from .choice import SpeculationSettings, drafts_its_own_way, make_drafter, with_settings
from .peers import Peers, share_refusal
from .route import (
    Asked,
    Inputs,
    Route,
    Server,
    route_of_inputs,
    route_of_passes,
    route_of_settings,
    try_transformers,
)
from .trial import TrialCall
from .wrappers import remove_adapter_hooks, unwrap

ModelT = TypeVar("ModelT")
BATCHED_INPUTS = ("input_ids", "attention_mask", "inputs_embeds", "decoder_input_ids")

logger = logging.get_logger(__name__)


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


@dataclass(frozen=True)
class _Prepared:
    """What a prepared generation config carries through `generate`."""

    asked: Asked
    route: Route | None = None


class SpeculationMixin(GenerationMixin):
    """The three methods of `GenerationMixin` that speculation overrides."""

    speculation_stats: DecodingStats | None = None

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        self.__dict__.pop("speculation_stats", None)
        hooks = {"on_round": kwargs.pop("on_round", None), "trace": kwargs.pop("trace", False)}
        if generation_config is not None and "_speculation" in vars(generation_config):
            # A model whose own `generate` prepares what is then prepared again: only the first call was the user's.
            asked: Asked = generation_config._speculation.asked
            generation_config = copy.copy(generation_config)
            del generation_config._speculation
        else:
            asked = Asked(SpeculationSettings.of_call(kwargs, generation_config, self.generation_config), **hooks)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        num_rows = next((len(kwargs[name]) for name in BATCHED_INPUTS if kwargs.get(name) is not None), None)
        if num_rows is not None:
            asked = replace(asked, num_rows=num_rows * (prepared.num_return_sequences or 1))
        prepared._speculation = _Prepared(asked)
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: dict
    ) -> None:
        synced_gpus = bool(generation_mode_kwargs.get("synced_gpus"))
        try:
            asked = _asked(generation_mode, generation_config, generation_mode_kwargs)
            if asked is None:
                super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
                return
            if generation_config.use_cache is False:
                logger.warning_once("`use_cache=False` is ignored: speculative decoding runs with the cache on.")
                generation_config.use_cache = True
            route = route_of_settings(self, asked, generation_config)
            route.raise_if_refused()
            generation_config._speculation = _Prepared(asked, route)
        except Exception as error:
            remove_adapter_hooks(self)
            if synced_gpus and generation_mode == GenerationMode.ASSISTED_GENERATION:
                share_refusal(error)
            raise
        if synced_gpus:
            share_refusal(None)

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
        prepared: _Prepared = generation_config._speculation
        del generation_config._speculation  # transformers copies the configuration for its drafters
        inputs = Inputs(input_ids, logits_processor, stopping_criteria, model_kwargs)
        call = AssistedCall(self, inputs, generation_config)
        try:
            assert prepared.route is not None, "`generate` validates before it decodes"
            route = route_of_inputs(prepared.route, self, prepared.asked, inputs)
            route.raise_if_refused()
            if route.server is Server.LOOP:
                drafter = make_drafter(self, assistant_model, prepared.asked.settings, tokenizer)
                requests = call.make_requests()
        except Exception as error:
            remove_adapter_hooks(self)
            if synced_gpus:
                share_refusal(error)
            raise
        if synced_gpus:  # from here on there are passes
            share_refusal(None)
        try:
            route = route_of_passes(route, self, prepared.asked, generation_config, inputs)
            route.raise_if_refused()
            if route.server is Server.TRANSFORMERS:
                assisted, drafting = super()._assisted_decoding, _drafting(prepared.asked, inputs_tensor)
                given = {name: value for name, value in drafting.items() if value is not None}
                super()._validate_generation_mode(GenerationMode.ASSISTED_GENERATION, generation_config, given)
                trial = TrialCall(self, assisted, input_ids, generation_config, drafting, model_kwargs)
                try_transformers(route, trial, assistant_model).raise_if_refused()
                return assisted(
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    streamer=streamer,
                    **drafting,
                    **model_kwargs,
                )
        except Exception:
            remove_adapter_hooks(self)
            raise
        decoder = call.make_decoder(drafter, prepared.asked)
        _decode(decoder, requests, streamer, synced_gpus)
        self.speculation_stats = decoder.stats
        return _output(call, requests, decoder.stats)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        base = type(self).__mro__[2]
        if _known_subclass(base) is not type(self):  # another library has made a class of ours
            return super().__reduce_ex__(protocol)
        return _rebuild, (base,), self.__dict__.copy()


def _asked(
    generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: dict
) -> Asked | None:
    """What a call with a drafter asks for, None if it has none."""
    assistant_model = generation_mode_kwargs.get("assistant_model")
    is_drafter = drafts_its_own_way(assistant_model) or hasattr(assistant_model, "generate")
    if assistant_model is not None and not is_drafter:
        raise TypeError(
            f"`assistant_model` has to be a causal language model or a `Drafter`, but is {assistant_model!r}."
        )
    asked = generation_config._speculation.asked
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        names = ("assistant_model", "assistant_tokenizer", "tokenizer", "streamer")
        given = {name: generation_mode_kwargs.get(name) for name in names}
        return replace(asked, **given, synced_gpus=bool(generation_mode_kwargs.get("synced_gpus")))
    if assistant_model is not None or generation_config.prompt_lookup_num_tokens is not None:
        raise ValueError(
            "Speculative decoding knows greedy search and sampling, but the settings ask for "
            f"{generation_mode.value!r}. Drop the drafter or set `num_beams=1`."
        )
    if asked.on_round is not None or asked.trace:
        raise ValueError("`on_round` and `trace` need `assistant_model` or `prompt_lookup_num_tokens`.")
    return None


def _decode(decoder: Decoder, requests: list[Request], streamer: BaseStreamer | None, synced_gpus: bool) -> None:
    num_streamed = 0
    with Peers(decoder.model) if synced_gpus else nullcontext() as peers:
        for _ in decoder.run(requests, None if peers is None else peers.have_unfinished):
            if streamer is not None:
                for token_id in requests[0].token_ids[num_streamed:]:
                    streamer.put(torch.tensor([token_id]))
                num_streamed = len(requests[0].token_ids)
    if streamer is not None:
        streamer.end()


def _drafting(asked: Asked, inputs_tensor: Tensor | None) -> dict[str, Any]:
    """The arguments by which transformers' own loop drafts."""
    return {
        "assistant_model": with_settings(asked.assistant_model, asked.settings),
        "assistant_tokenizer": asked.assistant_tokenizer,
        "tokenizer": asked.tokenizer,
        "inputs_tensor": inputs_tensor,
    }


def _output(
    call: AssistedCall, requests: list[Request], stats: DecodingStats
) -> SpeculativeDecoderOnlyOutput | Tensor:
    sequences, config, pad_token_id = call.sequences(requests), call.config, requests[0].batch.pad_token_id
    if not config.return_dict_in_generate:
        return sequences
    scores, logits = ([getattr(request, name) for request in requests] for name in ("scores", "logits"))
    return SpeculativeDecoderOnlyOutput(
        sequences=sequences,
        scores=call.stacked(scores, pad_token_id) if config.output_scores else None,
        logits=call.stacked(logits, pad_token_id) if config.output_logits else None,
        speculation_stats=stats,
    )


# Weak on both sides: a class made on the fly is freed with its models.
_subclasses: "WeakKeyDictionary[type, ref[type]]" = WeakKeyDictionary()


def _speculative_class(base: type) -> type:
    subclass = _known_subclass(base)
    if subclass is None:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        subclass = type(base.__name__, (SpeculationMixin, base), names)
        _subclasses[base] = ref(subclass)
    return subclass


def _known_subclass(base: type) -> type | None:
    return _subclasses[base]() if base in _subclasses else None


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
        model ([`~transformers.PreTrainedModel`], `PeftModel`, or a compiled or data-parallel module):
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
    if _known_subclass(base) is type(target):
        target.__class__ = base
        target.__dict__.pop("speculation_stats", None)
    elif isinstance(target, SpeculationMixin):
        raise ValueError(
            f"The model's class was changed to {type(target).__name__!r} after `enable_speculation`; undo that first."
        )
    return model
