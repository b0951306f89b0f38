"""What a call of `generate` gave as its drafter, and with which settings."""

from dataclasses import dataclass
from typing import Any

from torch._dynamo import OptimizedModule
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..arguments import check_count, checked_probability
from ..drafters.causal_lm import CausalLMDrafter
from ..drafters.lookup import PromptLookupDrafter
from ..drafters.widths import ConfidenceThreshold
from ..dspark import DSparkDrafter, DSparkModel
from ..engine.decoder import RoundHook
from ..engine.drafter import MAX_CANDIDATES, Drafter
from ..engine.model_facts import check_vocab_sizes, vocab_size

ASSISTANT_SETTINGS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
)


@dataclass(frozen=True)
class SpeculationSettings:
    """
    What the caller said about speculation, None where nothing: transformers would fill in its own defaults.

    Attributes:
        said_in_call (`frozenset[str]`): names of settings given to this call, not by the model's own configuration.
        on_round (`RoundHook`, *optional*), trace (`bool`): see [`Decoder`].
    """

    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    max_matching_ngram_size: int | None = None
    said_in_call: frozenset[str] = frozenset()
    on_round: RoundHook | None = None
    trace: bool = False

    @classmethod
    def of_call(
        cls, kwargs: dict[str, Any], given: GenerationConfig | None, default: GenerationConfig
    ) -> "SpeculationSettings":
        """
        Reads the settings of a call and takes `on_round` and `trace` out of its keyword arguments.

        Args:
            kwargs (`dict[str, Any]`): the call's keyword arguments.
            given ([`~transformers.GenerationConfig`], *optional*): the configuration given to the call.
            default ([`~transformers.GenerationConfig`]): the model's own.
        """
        hooks = {"on_round": kwargs.pop("on_round", None), "trace": kwargs.pop("trace", False)}
        in_call = {name: _first(kwargs.get(name), getattr(given, name, None)) for name in ASSISTANT_SETTINGS}
        said = {name: _first(value, getattr(default, name)) for name, value in in_call.items()}
        names = frozenset(name for name, value in in_call.items() if value is not None)
        return cls(**said, said_in_call=names, **hooks)

    def refuse_said(self, served: set[str], why: str) -> None:
        """Raises `ValueError` if the call gave a setting outside `served`, rather than to drop it."""
        if unserved := self.said_in_call - served:
            raise ValueError(f"`{min(unserved)}` is given, but {why}.")


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def reason_for_transformers(assistant_model: Any, config: GenerationConfig, has_own_tokenizer: bool) -> str | None:
    """What asks for a drafter that only transformers' own loop knows, None if nothing does."""
    if has_own_tokenizer:
        return "the draft has another tokenizer (`assistant_tokenizer`)"
    if config.assistant_early_exit is not None:
        return "`assistant_early_exit` is set"
    if config.use_mtp:
        return "`use_mtp` is set"
    if config.speculation_type is not None:
        return f"`speculation_type` is {config.speculation_type!r}"
    if assistant_model is None or drafts_its_own_way(assistant_model):
        return None
    if type(assistant_model).__name__.startswith("Gemma4Assistant") or not hasattr(assistant_model, "forward"):
        return f"the drafter is a `{type(assistant_model).__name__}`"
    return None


def drafts_its_own_way(assistant_model: Any) -> bool:
    """Whether this is a [`Drafter`] or a [`DSparkModel`] rather than a causal language model."""
    return isinstance(assistant_model, Drafter) or _dspark_model(assistant_model) is not None


def _dspark_model(assistant_model: Any) -> DSparkModel | None:
    """A DSpark drafter, compiled or not."""
    model = assistant_model._orig_mod if isinstance(assistant_model, OptimizedModule) else assistant_model
    return model if isinstance(model, DSparkModel) else None


def make_drafter(
    target: PreTrainedModel,
    assistant_model: Any,
    config: GenerationConfig,
    settings: SpeculationSettings,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Drafter:
    """
    The drafter that a call asks for, with its settings; the user's models are left as they are.

    Raises:
        `ValueError` or `TypeError`: for settings that are wrong or that this drafter would ignore, and for a draft
            model with another vocabulary.
    """
    num_lookup_tokens = config.prompt_lookup_num_tokens
    if assistant_model is None:
        settings.refuse_said({"max_matching_ngram_size"}, "prompt lookup has no use for it")
        check_count("prompt_lookup_num_tokens", num_lookup_tokens, maximum=MAX_CANDIDATES)
        return PromptLookupDrafter(num_lookup_tokens, _first(settings.max_matching_ngram_size, 3))
    if num_lookup_tokens is not None:
        raise ValueError("Give either `assistant_model` or `prompt_lookup_num_tokens`, not both.")
    if isinstance(assistant_model, Drafter):
        settings.refuse_said(set(), "a `Drafter` carries its own settings")
        return assistant_model
    if (dspark_model := _dspark_model(assistant_model)) is not None:
        return _dspark_drafter(dspark_model, settings)
    is_model = isinstance(assistant_model, (PreTrainedModel, OptimizedModule))
    if not is_model and not hasattr(assistant_model, "get_base_model"):
        raise TypeError(f"`assistant_model` has to be a model or a `Drafter`, but is {assistant_model!r}.")
    _check_vocabularies(target, assistant_model, tokenizer)
    own = assistant_model.generation_config
    asked: dict[str, Any] = {
        "num_assistant_tokens": _first(settings.num_assistant_tokens, own.num_assistant_tokens),
        "schedule": _first(settings.num_assistant_tokens_schedule, own.num_assistant_tokens_schedule),
        "confidence_threshold": _first(settings.assistant_confidence_threshold, own.assistant_confidence_threshold),
    }
    return CausalLMDrafter(assistant_model, **{name: value for name, value in asked.items() if value is not None})


def _dspark_drafter(model: DSparkModel, settings: SpeculationSettings) -> DSparkDrafter:
    if settings.num_assistant_tokens_schedule not in (None, "constant"):
        raise ValueError(
            "`num_assistant_tokens_schedule` has to be 'constant' for a DSpark drafter, whose block is always drafted "
            f"whole, but is {settings.num_assistant_tokens_schedule!r}."
        )
    if settings.max_matching_ngram_size is not None:
        raise ValueError("`max_matching_ngram_size` is for prompt lookup; a DSpark drafter has no use for it.")
    model.check_generation_config()
    threshold = _first(settings.assistant_confidence_threshold, model.confidence_threshold)
    threshold = checked_probability("assistant_confidence_threshold", threshold)
    policy = ConfidenceThreshold(threshold) if threshold > 0 else None
    count = _first(settings.num_assistant_tokens, model.generation_config.num_assistant_tokens)
    return DSparkDrafter(model, count, policy)


def _check_vocabularies(target: PreTrainedModel, draft: Any, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Lets pass vocabularies of one tokenizer that are padded to different sizes."""
    target_size, draft_size = map(vocab_size, (target, draft))
    check_vocab_sizes(target_size, draft_size, None if tokenizer is None else len(tokenizer))
