"""The kinds of backends, by name. They differ in how the one loop is set up: how many rows, and which drafter."""

from dataclasses import fields
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.lookup import PromptLookupDrafter
from ..dspark import DSparkDrafter, DSparkModel
from ..engine.drafter import Drafter
from ..generation.choice import SpeculationSettings, make_drafter
from .backend import BackendSettings, GenerationBackend

DEFAULT_LOOKUP_TOKENS = 5
EAGER_SETTINGS = frozenset({"max_tokens_in_cache", "truncate_prompt", "mask_undecodable"})
BATCHED_SETTINGS = EAGER_SETTINGS | {"max_batch_size", "prefill_chunk_size"}
DRAFTING_SETTINGS = frozenset(field.name for field in fields(BackendSettings))


class EagerGenerationBackend(GenerationBackend):
    """One request after the other, token by token."""

    name = "eager"
    served_settings = EAGER_SETTINGS

    def fixed_settings(self) -> dict[str, Any]:
        return {"max_batch_size": 1}


class BatchedGenerationBackend(GenerationBackend):
    """Many requests side by side; as one ends, the next takes its seat."""

    name = "batched"
    served_settings = BATCHED_SETTINGS


class SpeculativeDecodingGenerationBackend(BatchedGenerationBackend):
    """As the batched one, with candidates from a draft model, or by lookup in a row's own text if there is none."""

    name = "speculative"
    served_settings = DRAFTING_SETTINGS

    def make_drafter(self) -> Drafter:
        given, count = self.settings, self.settings.num_assistant_tokens
        if given.draft_model is None:
            if given.assistant_confidence_threshold is not None:
                raise ValueError("`assistant_confidence_threshold` needs a `draft_model`.")
            return PromptLookupDrafter(DEFAULT_LOOKUP_TOKENS if count is None else count)
        said = {
            name: value
            for name in ("num_assistant_tokens", "assistant_confidence_threshold")
            if (value := getattr(given, name)) is not None
        }
        settings = SpeculationSettings(**said, said_in_call=frozenset(said))
        return make_drafter(self.model, given.draft_model, GenerationConfig(), settings, self.tokenizer)


class DSparkGenerationBackend(SpeculativeDecodingGenerationBackend):
    """As the batched one, with candidates from a DSpark drafter."""

    name = "dspark"

    def make_drafter(self) -> Drafter:
        if not isinstance(self.settings.draft_model, DSparkModel | DSparkDrafter):
            raise TypeError(
                f"The backend 'dspark' needs a `DSparkModel` as `draft_model`, but got {self.settings.draft_model!r}."
            )
        return super().make_drafter()


BACKENDS: dict[str, type[GenerationBackend]] = {
    kind.name: kind
    for kind in (
        EagerGenerationBackend,
        BatchedGenerationBackend,
        SpeculativeDecodingGenerationBackend,
        DSparkGenerationBackend,
    )
}


def get_generation_backend(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> GenerationBackend:
    """
    A backend by its name.

    Args:
        name (`str`):
            `"eager"`, `"batched"`, `"speculative"` or `"dspark"`.
        model ([`~transformers.PreTrainedModel`]), tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            What to generate with.
        settings (`dict[str, Any]`, *optional*):
            Fields of [`BackendSettings`] that the kind takes.

    Raises:
        `ValueError`: for an unknown name or setting, naming the known ones.
    """
    return backend_kind(name)(model, tokenizer, **settings)


def backend_kind(name: str) -> type[GenerationBackend]:
    """The class of a kind, to check settings without a model; raises `ValueError` for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"`name` has to be one of {sorted(BACKENDS)}, but is {name!r}.")
    return BACKENDS[name]
