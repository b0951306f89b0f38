"""The kinds of backends, by name. They differ in how the one loop is set up: how many rows, and which drafter."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.lookup import PromptLookupDrafter
from ..dspark import DSparkDrafter, DSparkModel
from ..engine.decoder import Decoder
from ..engine.drafter import Drafter
from ..engine.limits import CacheLimits
from ..generation import SpeculationSettings, make_drafter, unwrap
from .backend import GenerationBackend
from .prompt_encoder import PromptEncoder

Settings = Mapping[str, Any]
DEFAULT_LOOKUP_TOKENS = 5
SHARED_SETTINGS: Settings = {"max_tokens_in_cache": None, "truncate_prompt": None, "mask_undecodable": True}
BATCH_SETTINGS: Settings = {**SHARED_SETTINGS, "max_batch_size": 8, "prefill_chunk_size": 512}
DRAFT_SETTINGS: Settings = {
    **BATCH_SETTINGS,
    "draft_model": None,
    "num_assistant_tokens": None,
    "assistant_confidence_threshold": None,
}


def _no_drafter(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
    return None


def _any_drafter(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> Drafter:
    draft_model, count = settings["draft_model"], settings["num_assistant_tokens"]
    names = ("num_assistant_tokens", "assistant_confidence_threshold")
    given = {name: settings[name] for name in names if settings[name] is not None}
    if draft_model is None:
        if "assistant_confidence_threshold" in given:
            raise ValueError("`assistant_confidence_threshold` needs a `draft_model`.")
        return PromptLookupDrafter(DEFAULT_LOOKUP_TOKENS if count is None else count)
    wanted = SpeculationSettings(**given, given=frozenset(given))
    return make_drafter(model, draft_model, wanted, tokenizer)


def _dspark_drafter(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> Drafter:
    if not isinstance(settings["draft_model"], DSparkModel | DSparkDrafter):
        raise TypeError(
            f"The backend 'dspark' needs a `DSparkModel` as `draft_model`, but got {settings['draft_model']!r}."
        )
    return _any_drafter(model, tokenizer, settings)


@dataclass(frozen=True)
class BackendKind:
    """
    How a backend is set up.

    Args:
        settings (`Mapping[str, Any]`): what can be set, with the defaults.
        make_drafter (`Callable`): makes what proposes candidates, None for plain decoding.
    """

    settings: Settings
    make_drafter: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Settings], Drafter | None]


KINDS = {
    "eager": BackendKind(SHARED_SETTINGS, _no_drafter),
    "batched": BackendKind(BATCH_SETTINGS, _no_drafter),
    "speculative": BackendKind(DRAFT_SETTINGS, _any_drafter),
    "dspark": BackendKind(DRAFT_SETTINGS, _dspark_drafter),
}


def check_backend_settings(name: str, settings: Iterable[str]) -> None:
    """Raises `ValueError` for an unknown kind of backend, or a setting that it does not take; names the known ones."""
    if name not in KINDS:
        raise ValueError(f"`name` has to be one of {sorted(KINDS)}, but is {name!r}.")
    if unknown := sorted(set(settings) - KINDS[name].settings.keys()):
        raise ValueError(
            f"The backend {name!r} has no setting `{unknown[0]}`; it takes {sorted(KINDS[name].settings)}."
        )


def get_generation_backend(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> GenerationBackend:
    """
    A backend by its name.

    Args:
        name (`str`):
            - `"eager"`: one request after the other, token by token.
            - `"batched"`: many requests side by side; as one ends, the next takes its slot.
            - `"speculative"`: the same with candidates, from `draft_model`, or looked up in a row's own text.
            - `"dspark"`: the same with candidates from a DSpark drafter.
        model ([`~transformers.PreTrainedModel`]):
            The target.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer; left as it is.
        max_tokens_in_cache (`int`, *optional*), prefill_chunk_size (`int`, *optional*, defaults to 512):
            See [`CacheLimits`]; `"eager"` takes no `prefill_chunk_size`.
        truncate_prompt (`str`, *optional*):
            `"left"` keeps the end of a prompt that does not fit into the model's positions with its budget. By
            default it is refused.
        mask_undecodable (`bool`, *optional*, defaults to `True`):
            Whether ids that the tokenizer cannot decode, and padding, are never generated or drafted.
        max_batch_size (`int`, *optional*, defaults to 8):
            Requests that are decoded side by side; the others wait. Not for `"eager"`.
        draft_model (*optional*):
            A [`DSparkModel`], a smaller causal language model with the same tokenizer, or a [`Drafter`]. Only for
            `"speculative"`, which looks up n-grams without one, and for `"dspark"`.
        num_assistant_tokens (`int`, *optional*), assistant_confidence_threshold (`float`, *optional*):
            As in `generate`. Only for `"speculative"` and `"dspark"`.

    Raises:
        `ValueError` or `TypeError`: for an unknown name or setting, naming the known ones, for a setting that is wrong
            or can never work, and for models that the loop cannot serve.
    """
    check_backend_settings(name, settings)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"`tokenizer` has to be a transformers tokenizer, but is a {type(tokenizer).__name__!r}.")
    target, given = unwrap(model), {**KINDS[name].settings, **settings}
    return GenerationBackend(
        partial(_make_decoder, name, target, tokenizer, given),
        partial(PromptEncoder, target, tokenizer, given["truncate_prompt"], given["mask_undecodable"]),
    )


def _make_decoder(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> Decoder:
    chunk = settings.get("prefill_chunk_size", BATCH_SETTINGS["prefill_chunk_size"])
    limits = CacheLimits(None, settings["max_tokens_in_cache"], chunk)
    drafter = KINDS[name].make_drafter(model, tokenizer, settings)
    return Decoder(model, drafter, settings.get("max_batch_size", 1), limits)
