"""What a call of `generate` says about speculation, and the drafter that it asks for."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch._dynamo import OptimizedModule
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..arguments import check_count, checked_probability, shown
from ..drafters.causal_lm import CausalLMDrafter
from ..drafters.lookup import PromptLookupDrafter
from ..drafters.widths import ConfidenceThreshold
from ..dspark import DSparkDrafter, DSparkModel
from ..engine.drafter import MAX_CANDIDATES, Drafter
from ..engine.model_facts import check_vocab_sizes, vocab_size
from .wrappers import is_peft_model, without_data_parallel


@dataclass(frozen=True)
class SpeculationSettings:
    """
    How to draft, under the names of [`~transformers.GenerationConfig`]; None where nobody said anything, where
    transformers would fill in its own defaults.

    Args:
        num_assistant_tokens (`int`, *optional*):
            Candidates per round of a draft model.
        num_assistant_tokens_schedule (`str`, *optional*):
            Whether that number follows acceptance.
        assistant_confidence_threshold (`float`, *optional*):
            In [0, 1]. A causal language model stops drafting after a candidate of less probability. Of a DSpark
            drafter's candidates those before the first of less confidence are verified.
        prompt_lookup_num_tokens (`int`, *optional*):
            Candidates per round of prompt lookup.
        max_matching_ngram_size (`int`, *optional*):
            The longest n-gram that prompt lookup looks for.
        given (`frozenset[str]`, *optional*):
            Names of settings that the call itself gave, rather than the model's own configuration.
    """

    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    given: frozenset[str] = frozenset()

    @classmethod
    def of_call(
        cls, kwargs: Mapping[str, Any], generation_config: GenerationConfig | None, default: GenerationConfig
    ) -> "SpeculationSettings":
        """
        What a call of `generate` says.

        Args:
            kwargs (`Mapping[str, Any]`): its keyword arguments.
            generation_config ([`~transformers.GenerationConfig`], *optional*): the one that it gave.
            default ([`~transformers.GenerationConfig`]): the model's own.
        """
        in_config = {} if generation_config is None else vars(generation_config)
        in_call = {name: _first(kwargs.get(name), in_config.get(name)) for name in SETTING_NAMES}
        values = {name: _first(value, vars(default).get(name)) for name, value in in_call.items()}
        return cls(**values, given=frozenset(name for name, value in in_call.items() if value is not None))

    def refuse_given(self, served: set[str], why: str) -> None:
        """Raises `ValueError` if the call gave a setting outside `served`, rather than to ignore it."""
        if unserved := self.given - served:
            name = min(unserved)
            raise ValueError(f"`{name}` is given, but {why}. Leave out its {shown(vars(self)[name])}.")


SETTING_NAMES = tuple(field.name for field in fields(SpeculationSettings) if field.name != "given")
LOOKUP_SETTINGS = {"prompt_lookup_num_tokens", "max_matching_ngram_size"}
MODEL_SETTINGS = set(SETTING_NAMES) - LOOKUP_SETTINGS


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def drafts_its_own_way(assistant_model: Any) -> bool:
    """Whether this is a [`Drafter`] or a [`DSparkModel`] rather than a causal language model."""
    return isinstance(assistant_model, Drafter) or _dspark_model(assistant_model) is not None


def _dspark_model(assistant_model: Any) -> DSparkModel | None:
    """A DSpark drafter, wrapped or not."""
    assistant_model = without_data_parallel(assistant_model)
    model = assistant_model._orig_mod if isinstance(assistant_model, OptimizedModule) else assistant_model
    return model if isinstance(model, DSparkModel) else None


def make_drafter(
    target: PreTrainedModel,
    assistant_model: Any,
    settings: SpeculationSettings,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Drafter:
    """
    The drafter that a call asks for, with its settings; the user's models are left as they are.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            The model that is drafted for.
        assistant_model (*optional*):
            A causal language model, a [`DSparkModel`] or a [`Drafter`]; None for prompt lookup.
        settings ([`SpeculationSettings`]):
            How to draft.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tells whether vocabularies of different sizes are paddings of one.

    Raises:
        `ValueError` or `TypeError`: for settings that are wrong or that this drafter would ignore, and for a draft
            model with another vocabulary.
    """
    if assistant_model is None:
        settings.refuse_given(LOOKUP_SETTINGS, "prompt lookup has no use for it")
        num_tokens = settings.prompt_lookup_num_tokens
        assert num_tokens is not None, "`generate` takes no call for an assisted one without a drafter"
        check_count("prompt_lookup_num_tokens", num_tokens, maximum=MAX_CANDIDATES)
        return PromptLookupDrafter(num_tokens, _first(settings.max_matching_ngram_size, 3))
    if settings.prompt_lookup_num_tokens is not None:
        raise ValueError("Give either `assistant_model` or `prompt_lookup_num_tokens`, not both.")
    if isinstance(assistant_model, Drafter):
        settings.refuse_given(set(), "a `Drafter` carries its own settings")
        return assistant_model
    settings.refuse_given(MODEL_SETTINGS, "a draft model has no use for it")
    assistant_model = without_data_parallel(assistant_model)
    if (dspark_model := _dspark_model(assistant_model)) is not None:
        return _dspark_drafter(dspark_model, settings)
    if not isinstance(assistant_model, PreTrainedModel | OptimizedModule) and not is_peft_model(assistant_model):
        raise TypeError(f"`assistant_model` has to be a model or a `Drafter`, but is {assistant_model!r}.")
    check_vocab_sizes(vocab_size(target), vocab_size(assistant_model), None if tokenizer is None else len(tokenizer))
    own = assistant_model.generation_config
    asked: dict[str, Any] = {
        "num_assistant_tokens": _first(settings.num_assistant_tokens, own.num_assistant_tokens),
        "schedule": _first(settings.num_assistant_tokens_schedule, own.num_assistant_tokens_schedule),
        "probability_threshold": _first(settings.assistant_confidence_threshold, own.assistant_confidence_threshold),
    }
    return CausalLMDrafter(assistant_model, **{name: value for name, value in asked.items() if value is not None})


def _dspark_drafter(model: DSparkModel, settings: SpeculationSettings) -> DSparkDrafter:
    if settings.num_assistant_tokens_schedule not in (None, "constant"):
        raise ValueError(
            "`num_assistant_tokens_schedule` has to be 'constant' for a DSpark drafter, whose block is always drafted "
            f"whole, but is {settings.num_assistant_tokens_schedule!r}."
        )
    model.check_generation_config()
    threshold = checked_probability(
        "assistant_confidence_threshold", _first(settings.assistant_confidence_threshold, model.confidence_threshold)
    )
    policy = ConfidenceThreshold(threshold) if threshold > 0 else None
    count = _first(settings.num_assistant_tokens, model.generation_config.num_assistant_tokens)
    return DSparkDrafter(model, count, policy)


def with_settings(assistant_model: Any, settings: SpeculationSettings) -> Any:
    """
    What transformers' own loop is given as its draft: a view of the model whose configuration holds the call's
    settings, since that loop reads no others. The model itself stays as it is.

    Raises:
        `ValueError` or `TypeError`: for settings that are wrong or that this loop would ignore.
    """
    elsewhere = (
        "transformers' own loop serves this call and reads it from the draft's `generation_config`; set it there"
    )
    if assistant_model is None:
        served = set() if settings.prompt_lookup_num_tokens is None else LOOKUP_SETTINGS
        settings.refuse_given(served, elsewhere)
        return None
    is_dspark = isinstance(assistant_model, DSparkModel)
    has_view = is_dspark or isinstance(assistant_model, PreTrainedModel)
    settings.refuse_given(MODEL_SETTINGS if has_view else set(), elsewhere)
    said = {name: vars(settings)[name] for name in sorted(MODEL_SETTINGS) if vars(settings)[name] is not None}
    if not said or not has_view:
        return assistant_model
    if "num_assistant_tokens" in said:
        check_count("num_assistant_tokens", said["num_assistant_tokens"])
    if "assistant_confidence_threshold" in said:
        checked_probability("assistant_confidence_threshold", said["assistant_confidence_threshold"])
    view = copy.copy(assistant_model)
    if is_dspark and "assistant_confidence_threshold" in said:
        view.confidence_threshold = said.pop("assistant_confidence_threshold")
    view.generation_config = copy.deepcopy(assistant_model.generation_config)
    view.generation_config.update(**said)
    return view
