"""Who serves a call of `generate` with a drafter: this package's loop, transformers' own, or nobody.

Decided once per call and in this file only, in the order in which facts come: what the model and the settings say is
known before `generate` prepares its inputs, which may run an encoder; then what the inputs say; then what passes show.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..engine.drafter import Drafter
from ..engine.selfcheck import ragged_problem
from ..engine.support import is_sharded, unsupported_reason
from .choice import SpeculationSettings, drafts_its_own_way
from .trial import TrialCall, stock_problem
from .wrappers import adapter_names_of_rows

MODEL_KWARGS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
SIMPLE_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class Server(Enum):
    """Who runs a call."""

    LOOP = "this package's loop"
    TRANSFORMERS = "transformers' own assisted decoding"
    NOBODY = "nobody"


@dataclass(frozen=True)
class Route:
    """
    The decision.

    Args:
        server ([`Server`]): who serves the call.
        reason (`str`, *optional*): why not this package's loop; for nobody the whole sentence.
    """

    server: Server
    reason: str = ""

    def raise_if_refused(self) -> None:
        """Raises `ValueError` with the reason if nobody serves the call."""
        if self.server is Server.NOBODY:
            raise ValueError(self.reason)


@dataclass(frozen=True)
class Asked:
    """
    What a call asks for beside its inputs.

    Args:
        settings ([`SpeculationSettings`]): how to draft.
        on_round (`RoundHook`, *optional*), trace (`bool`): see [`Decoder`].
        num_rows (`int`, *optional*): rows of the batch, as far as keyword arguments tell.
        assistant_model, assistant_tokenizer, tokenizer, streamer, synced_gpus: the arguments of `generate`.
    """

    settings: SpeculationSettings
    on_round: Any = None
    trace: bool = False
    num_rows: int | None = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    tokenizer: Any = None
    streamer: Any = None
    synced_gpus: bool = False


@dataclass(frozen=True)
class Inputs:
    """What `generate` has prepared when it comes to assisted decoding."""

    input_ids: Tensor  # (rows, length)
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    model_kwargs: dict[str, Any]

    @property
    def given(self) -> set[str]:
        """The model inputs that ask for something: None and empty containers do not."""
        empty = {n for n, value in self.model_kwargs.items() if isinstance(value, dict | list | tuple) and not value}
        return {name for name, value in self.model_kwargs.items() if value is not None} - empty

    @property
    def attention_mask(self) -> Tensor:
        """Ones where the batch has tokens, `(rows, length)`."""
        mask = self.model_kwargs.get("attention_mask")
        return torch.ones_like(self.input_ids) if mask is None else mask.to(self.input_ids.device)


def route_of_settings(model: PreTrainedModel, asked: Asked, config: GenerationConfig) -> Route:
    """Decides by the model, the drafter and the settings, before any pass."""
    if problem := _wrong_everywhere(model, asked, config):
        return _refused(problem)
    reason = (
        _drafter_reason(asked, config)
        or unsupported_reason(model)
        or _settings_reason(config)
        or _draft_reason(asked.assistant_model)
    )
    if reason is None:
        if adapters := adapter_names_of_rows(model):
            reason = f"`adapter_names` gives rows adapters of their own ({adapters}), and the loop moves rows"
        elif asked.synced_gpus and is_sharded(asked.assistant_model):
            return _refused(
                "under `synced_gpus` the draft model cannot be sharded, since ranks draft different numbers of "
                "tokens; keep a whole copy of it on every rank"
            )
        else:
            return Route(Server.LOOP)
    return _handed_over(Route(Server.TRANSFORMERS, reason), model, asked)


def route_of_inputs(route: Route, model: PreTrainedModel, asked: Asked, inputs: Inputs) -> Route:
    """Adds what the prepared inputs say."""
    asked = replace(asked, num_rows=len(inputs.input_ids))
    if problem := _wrong_inputs(model, inputs) or _wrong_rows(asked):
        return _refused(problem)
    if route.server is Server.LOOP and (reason := _inputs_reason(model, inputs)):
        route = Route(Server.TRANSFORMERS, reason)
    return _handed_over_inputs(route, model, asked, inputs)


def route_of_passes(
    route: Route, model: PreTrainedModel, asked: Asked, config: GenerationConfig, inputs: Inputs
) -> Route:
    """Adds what passes of the models show at their first use, on all ranks alike."""
    if route.server is not Server.LOOP or (reason := _ragged_reason(model, asked, config)) is None:
        return route
    asked = replace(asked, num_rows=len(inputs.input_ids))
    return _handed_over_inputs(Route(Server.TRANSFORMERS, reason), model, asked, inputs)


def try_transformers(route: Route, call: TrialCall, drafter: Any) -> Route:
    """The route to transformers' own loop, or a refusal if that loop decodes the call wrongly."""
    problem = stock_problem(call, drafter)
    return route if problem is None else _refused_by_stock(route.reason, problem)


def _refused(problem: str) -> Route:
    return Route(Server.NOBODY, f"Speculative decoding cannot serve this call: {problem}.")


def _refused_by_stock(reason: str, problem: str) -> Route:
    return _refused(f"{reason}. transformers' own loop {problem}. Call `generate` without a drafter")


def _handed_over(route: Route, model: PreTrainedModel, asked: Asked) -> Route:
    """The route to transformers' own loop, or a refusal if that loop is known to refuse or to miss something."""
    if model._is_stateful:
        return _refused_by_stock(route.reason, "refuses such models too")
    if asked.num_rows is not None and asked.num_rows > 1:
        return _refused_by_stock(route.reason, f"takes one row at a time, and the batch has {asked.num_rows}")
    if isinstance(asked.assistant_model, Drafter):
        return _refused_by_stock(route.reason, f"knows no `{type(asked.assistant_model).__name__}`")
    if asked.synced_gpus:
        return _refused_by_stock(route.reason, "runs past the end of a rank that has finished, under `synced_gpus`")
    if asked.on_round is not None or asked.trace:
        return _refused_by_stock(route.reason, "knows no `on_round` and no `trace`")
    return route


def _handed_over_inputs(route: Route, model: PreTrainedModel, asked: Asked, inputs: Inputs) -> Route:
    if route.server is not Server.TRANSFORMERS:
        return route
    others = [c for c in inputs.stopping_criteria if type(c) not in SIMPLE_CRITERIA]
    if others:
        return _refused_by_stock(route.reason, f"misses ends by `{type(others[0]).__name__}` inside a block")
    return _handed_over(route, model, asked)


def _wrong_everywhere(model: PreTrainedModel, asked: Asked, config: GenerationConfig) -> str | None:
    """What transformers' own loop would get wrong as well."""
    if config.cache_implementation == "quantized":
        return "a quantized cache (`cache_implementation='quantized'`) cannot be rolled back"
    if config.prefill_chunk_size is not None:
        return f"`prefill_chunk_size` ({config.prefill_chunk_size}) is not supported; leave it out"
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if config.output_attentions and attention != "eager":
        return (
            f"`output_attentions` needs eager attention, but the model runs on {attention!r}; call "
            "`model.set_attn_implementation('eager')`"
        )
    return _wrong_rows(asked)


def _wrong_rows(asked: Asked) -> str | None:
    if asked.streamer is not None and asked.num_rows is not None and asked.num_rows > 1:
        return f"`streamer` works with one row at a time, but the batch has {asked.num_rows} rows"
    return None


def _wrong_inputs(model: PreTrainedModel, inputs: Inputs) -> str | None:
    cache = inputs.model_kwargs.get("cache")
    if inputs.model_kwargs.get("inputs_embeds") is not None:
        return "`inputs_embeds` without token ids leaves nothing to draft from; pass `input_ids`"
    if inputs.input_ids.shape[1] == 0:
        return "the prompt is empty"
    if cache is not None and not model.config.is_encoder_decoder and cache.get_seq_length() > 0:
        return "the given `cache` is not empty; pass the whole conversation as `input_ids` instead"
    if stateful := [p for p in inputs.logits_processor if isinstance(p, STATEFUL_PROCESSORS)]:
        return (
            f"`{type(stateful[0]).__name__}` (`guidance_scale` or SynthID watermarking) keeps a state from call to "
            "call, which refused candidates would spoil"
        )
    return None


def _drafter_reason(asked: Asked, config: GenerationConfig) -> str | None:
    """What asks for a drafter that only transformers' own loop knows."""
    drafter = asked.assistant_model
    if asked.assistant_tokenizer is not None:
        return "the draft has another tokenizer (`assistant_tokenizer`)"
    if config.assistant_early_exit is not None:
        return f"`assistant_early_exit` is {config.assistant_early_exit!r}"
    if config.use_mtp:
        return "`use_mtp` is set"
    if config.speculation_type is not None:
        return f"`speculation_type` is {config.speculation_type!r}"
    if drafter is None or drafts_its_own_way(drafter):
        return None
    if type(drafter).__name__.startswith("Gemma4Assistant") or not hasattr(drafter, "forward"):
        return f"the drafter is a `{type(drafter).__name__}`"
    return None


def _draft_reason(assistant_model: Any) -> str | None:
    if not isinstance(assistant_model, PreTrainedModel) or drafts_its_own_way(assistant_model):
        return None
    reason = unsupported_reason(assistant_model)
    return None if reason is None else f"as a draft, {reason}"


def _settings_reason(config: GenerationConfig) -> str | None:
    if config.cache_implementation not in (None, "dynamic", "static"):
        return f"`cache_implementation` is {config.cache_implementation!r}"
    if config.assistant_ensemble_weight is not None:
        return f"`assistant_ensemble_weight` ({config.assistant_ensemble_weight}) changes the output distribution"
    if config.output_attentions or config.output_hidden_states:
        return "`output_attentions` and `output_hidden_states` are not collected"
    return None


def _inputs_reason(model: PreTrainedModel, inputs: Inputs) -> str | None:
    cache = inputs.model_kwargs.get("cache")
    if cache is not None and hasattr(cache, "_is_user_defined"):
        return "a `cache` is given"
    if extra := inputs.given - MODEL_KWARGS:
        return f"the model inputs {sorted(extra)} are not known to the loop"
    mask = inputs.attention_mask != 0
    has_holes = bool((mask[:, :-1] & ~mask[:, 1:]).any())
    kinds = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0]
    if has_holes and "sliding_attention" in kinds:
        return "the attention mask has zeros inside a row, which sliding windows count"
    if not _has_default_positions(inputs):
        return "`position_ids` are not those that the attention mask implies"
    return None


def _ragged_reason(model: PreTrainedModel, asked: Asked, config: GenerationConfig) -> str | None:
    draft = asked.assistant_model
    has_draft_model = isinstance(draft, PreTrainedModel) and not drafts_its_own_way(draft)
    return ragged_problem(model, longest=config.max_length) or (
        ragged_problem(draft, "draft model") if has_draft_model else None
    )


def _has_default_positions(inputs: Inputs) -> bool:
    position_ids = inputs.model_kwargs.get("position_ids")
    if position_ids is None:
        return True
    mask = inputs.attention_mask
    expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    position_ids = position_ids.to(mask.device).masked_fill(mask == 0, 0)
    return position_ids.shape[-1] == mask.shape[-1] and bool((position_ids == expected).all())
