"""Whether transformers' own assisted decoding is right for a call, seen rather than known from names.

The first tokens of the call itself, greedy: once by plain `generate`, once by assisted decoding with candidates of
which some are right and some are wrong, once with the call's own drafter. Once per model and kind of inputs.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import ModelOutput

from ..engine.model_facts import context_length, execution_device
from ..engine.selfcheck import in_eval_mode

NUM_TRIED = 8
BEYOND_WINDOW = 4  # tokens of the prompt that is tried behind a sliding window
OWN_DRAFTERS = {
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "speculation_type": None,
    "assistant_ensemble_weight": None,
}

_problems: "WeakKeyDictionary[PreTrainedModel, dict[tuple, str | None]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class TrialCall:
    """
    The call that is tried: `assisted` is transformers' own method, bound to the model; `drafting` holds the arguments
    that name the drafter.
    """

    model: PreTrainedModel
    assisted: Callable[..., Any]
    input_ids: Tensor  # (1, length)
    generation_config: GenerationConfig
    drafting: Mapping[str, Any]
    model_kwargs: Mapping[str, Any]

    @property
    def is_plain_text(self) -> bool:
        """Whether nothing but ids goes into the model, so that a longer prompt can be made of them."""
        known = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
        given = {name for name, value in self.model_kwargs.items() if value is not None and value != {}}
        return not self.model.config.is_encoder_decoder and given <= known


def stock_problem(call: TrialCall, drafter: Any) -> str | None:
    """What transformers' own loop gets wrong in this call with `drafter`, None if nothing was seen."""
    names = frozenset(name for name, value in call.model_kwargs.items() if value is not None)
    known = _problems.setdefault(call.model, {})
    for window in (0, *_windows_passed(call)):
        key = (names, window, ref(drafter) if isinstance(drafter, nn.Module) else type(drafter))
        if key not in known:
            known[key] = _tried(_beyond(call, window) if window else call)
        if known[key] is not None:
            return known[key]
    return None


def _windows_passed(call: TrialCall) -> list[int]:
    """The windows that the prompt does not fill and the text can pass: there a short trial shows nothing."""
    if not call.is_plain_text:
        return []
    config = call.model.config.get_text_config(decoder=True)
    windows = {value for name, value in config.to_dict().items() if "window" in name and type(value) is int}
    windows |= {setting["sliding_window"] for setting in _layer_settings(config) if "sliding_window" in setting}
    length, longest = call.input_ids.shape[1], call.generation_config.max_length
    limit = context_length(call.model) or longest
    return sorted(w for w in windows if length < w < longest and w + BEYOND_WINDOW + NUM_TRIED <= limit)


def _layer_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    return get_layer_types_and_kwargs(config)[1]


def _beyond(call: TrialCall, window: int) -> TrialCall:
    """The same call with its prompt repeated until it is longer than a window."""
    length = window + BEYOND_WINDOW
    input_ids = call.input_ids.repeat(1, -(-length // call.input_ids.shape[1]))[:, :length]
    positions = torch.arange(length, device=input_ids.device)[None]
    longer = {
        "position_ids": positions,
        "attention_mask": torch.ones_like(input_ids),
        "cache": DynamicCache(config=call.model.config.get_text_config(decoder=True)),
    }
    model_kwargs = {
        name: value if name in ("use_cache", "logits_to_keep") else longer[name]
        for name, value in call.model_kwargs.items()
        if value is not None and value != {}
    }
    return TrialCall(call.model, call.assisted, input_ids, call.generation_config, call.drafting, model_kwargs)


@dataclass(frozen=True)
class _Text:
    token_ids: list[int]
    logits: list[Tensor]  # each (vocab,)


def _tolerance(model: PreTrainedModel) -> float:
    """What the scores of two kernels may differ by, as a part of the largest."""
    return 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1


@torch.no_grad()
def _tried(call: TrialCall) -> str | None:
    with in_eval_mode(call.model):
        config = _trial_config(call)
        expected = _plain(call, config)
        guessed = copy.copy(config)
        guessed.update(**OWN_DRAFTERS)
        guesses = {
            "assistant_model": _Guesses(call, expected.token_ids),
            "inputs_tensor": call.drafting["inputs_tensor"],
        }
        for drafting, own in ((guesses, guessed), (call.drafting, config)):
            try:
                found = _assisted(call, own, drafting)
            except Exception as error:  # whatever it is, a call would meet it
                return f"fails with {type(error).__name__}: {str(error).rstrip('.')}"
            if (problem := _difference(expected, found, _tolerance(call.model))) is not None:
                return problem
    return None


def _trial_config(call: TrialCall) -> GenerationConfig:
    config = copy.copy(call.generation_config)
    vars(config).pop("_speculation", None)
    room = (context_length(call.model) or torch.inf) - call.input_ids.shape[1]
    config.max_length = call.input_ids.shape[1] + int(max(1, min(NUM_TRIED, room)))
    config.do_sample = config.output_scores = config.output_attentions = config.output_hidden_states = False
    config.return_dict_in_generate = config.output_logits = True
    config._eos_token_tensor = None
    return config


def _arguments(call: TrialCall, config: GenerationConfig) -> dict[str, Any]:
    names = ("output_attentions", "output_hidden_states")
    kwargs = {name: value for name, value in call.model_kwargs.items() if name not in names}
    if kwargs.get("cache") is not None:
        kwargs["cache"] = copy.deepcopy(kwargs["cache"])  # nothing is in it yet
    return {
        "input_ids": call.input_ids,
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(config.max_length)]),
        "generation_config": config,
        **kwargs,
    }


def _plain(call: TrialCall, config: GenerationConfig) -> _Text:
    return _text(call.model._sample(**_arguments(call, config), synced_gpus=False, streamer=None), call)


def _assisted(call: TrialCall, config: GenerationConfig, drafting: Mapping[str, Any]) -> _Text:
    return _text(call.assisted(**_arguments(call, config), **drafting), call)


def _text(outputs: ModelOutput, call: TrialCall) -> _Text:
    token_ids = outputs.sequences[0, call.input_ids.shape[1] :].tolist()
    return _Text(token_ids, [scores[0].float() for scores in outputs.logits])


def _difference(expected: _Text, found: _Text, tolerance: float) -> str | None:
    """Where the scores differ. A text goes another way where two tokens are too close to be told apart."""
    for index, (wanted, actual) in enumerate(zip(expected.logits, found.logits)):
        difference = float((wanted - actual).abs().max() / wanted.abs().max().clamp(min=1e-30))
        if not difference <= tolerance:
            return (
                f"is wrong too: in a trial its scores after {index} new tokens differ from those of plain `generate` "
                f"by {difference:.2g} of their largest value"
            )
        if expected.token_ids[index] != found.token_ids[index]:
            return None
    if len(found.token_ids) != len(expected.token_ids):
        return f"is wrong too: in a trial it ends after {len(found.token_ids)} of {len(expected.token_ids)} tokens"
    return None


@dataclass(frozen=True)
class _GuessedOutput:
    sequences: Tensor  # (1, length + k)
    scores: tuple[Tensor, ...]  # k of shape (1, vocab)
    cache: None = None


class _GuessesConfig:
    """What assisted decoding reads of an assistant's configuration."""

    is_encoder_decoder = False

    def __init__(self, text_config: PreTrainedConfig):
        self._text_config = text_config

    def get_text_config(self, **kwargs: Any) -> PreTrainedConfig:
        return self._text_config


class _Guesses:
    """An assistant that knows the text. In every other round its second candidate is wrong."""

    def __init__(self, call: TrialCall, expected: list[int]):
        self.config = _GuessesConfig(call.model.config.get_text_config(decoder=True))
        self.device = execution_device(call.model)
        self.generation_config = GenerationConfig(
            num_assistant_tokens=2, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        self._prompt_length = call.input_ids.shape[1]
        self._expected = expected
        self._num_rounds = 0

    def _supports_logits_to_keep(self) -> bool:
        return False

    def generate(self, input_ids: Tensor, max_new_tokens: int, **kwargs: Any) -> _GuessedOutput:
        done = input_ids.shape[1] - self._prompt_length
        guesses = self._expected[done : done + max_new_tokens]
        if self._num_rounds % 2 and len(guesses) > 1:
            guesses[1] = (guesses[1] + 1) % self.config.get_text_config().vocab_size
        self._num_rounds += 1
        sequences = torch.cat([input_ids, torch.tensor([guesses], device=input_ids.device)], dim=1)
        vocab_size = self.config.get_text_config().vocab_size
        scores = nn.functional.one_hot(torch.tensor(guesses, device=input_ids.device), vocab_size).float()
        return _GuessedOutput(sequences, tuple(row[None] for row in scores))
