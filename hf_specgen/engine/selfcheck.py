"""What a model computes on ragged rows, compared with plain passes at its first use, once per model.

Configurations do not tell everything: whether layers follow positions and masks, and whether they read the sliding
window that their configuration names.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..layers.slot_cache import SlotCache, SlotLayer
from .batch import forward, padded
from .model_facts import execution_device, learned_positions, num_input_ids, rope_switch
from .support import is_sharded

CHECKED_TOKENS = 24  # longer than the windows of tiny models
CHECKED_BEYOND = 8  # tokens behind a sliding window
NUM_TAIL = 2  # tokens that are fed in a second pass

_checked: dict[str, "WeakSet[PreTrainedModel]"] = {"target": WeakSet(), "draft model": WeakSet()}
_spares_prompts: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()
_check_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may hold it when a process is forked
    os.register_at_fork(after_in_child=_check_lock._at_fork_reinit)  # type: ignore[attr-defined]


def ragged_problem(model: PreTrainedModel, role: str = "target", longest: int = 0) -> str | None:
    """
    Runs two ragged rows on a [`SlotCache`]. A target has to compute for them what plain passes compute for each alone;
    a draft model only has to run, since its target judges every candidate.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A causal language model.
        role (`str`, *optional*, defaults to `"target"`):
            `"target"` or `"draft model"`.
        longest (`int`, *optional*, defaults to 0):
            Up to how many tokens its rows can grow: windows are compared once they matter.

    Returns:
        What is wrong, with the difference found; None if nothing is.
    """
    try:
        with _check_lock:
            is_checked = model in _checked[role]
        if not is_checked:
            cache, difference = _compared(model, role)
            if role == "target" and not difference <= _tolerance(cache):
                return (
                    f"`{type(model).__name__}` does not decode ragged rows as it decodes single ones: the logits "
                    f"differ by {difference:.2g} of their largest value"
                )
            if is_sharded(model) and cache.sliding_window is not None:
                _spares_prompt_of(model, cache.sliding_window, role)  # later, not all ranks might come to it
            with _check_lock:
                _checked[role].add(model)
        if longest > 0:
            check_window(model, SlotCache(model.config, num_rows=1), longest, role)
    except RaggedError as error:
        return str(error)
    return None


def self_check(model: PreTrainedModel, role: str = "target") -> None:
    """Raises `ValueError` if the model cannot decode ragged rows; see `ragged_problem`."""
    if problem := ragged_problem(model, role):
        way_out = "another draft" if role == "draft model" else "it without `enable_speculation`"
        raise ValueError(f"{problem}. Use {way_out}.")


class RaggedError(ValueError):
    """A model does not run on ragged rows, or not as on single ones."""


def check_window(model: PreTrainedModel, cache: SlotCache, longest: int, role: str = "target") -> None:
    """
    Tells `cache` how the model's layers cut their sliding window, before rows of up to `longest` tokens pass it.

    Layers that read no window see the whole prompt. What is generated sees the window all the same where plain
    `generate` caches no more than that; `cache.spares_prompts` says so.

    Raises:
        `ValueError`: if the model does neither.
    """
    if cache.sliding_window is not None and longest > cache.sliding_window:
        cache.spares_prompts = _spares_prompt_of(model, cache.sliding_window, role)


def _spares_prompt_of(model: PreTrainedModel, window: int, role: str) -> bool:
    with _check_lock:
        if model in _spares_prompts:
            return _spares_prompts[model]
    differences = {}
    for spares_prompts in (False, True):
        cache, differences[spares_prompts] = _compared(model, role, window, spares_prompts)
        if differences[spares_prompts] <= 1e-2 * _tolerance(cache):
            break
    best = min(differences, key=lambda kind: differences[kind])
    if role == "target" and not differences[best] <= _tolerance(cache):
        raise RaggedError(
            f"`{type(model).__name__}` does not cut its sliding window of {window} tokens as a row of its own would: "
            f"the logits differ by {differences[best]:.2g} of their largest value. Keep prompt and budget within the "
            "window"
        )
    with _check_lock:
        _spares_prompts[model] = best
    return best


def _tolerance(cache: SlotCache) -> float:
    # What is cached tells the precision of the computation, which autocast lowers below that of the weights.
    layers = [layer for layer in cache.layers if isinstance(layer, SlotLayer) and layer.is_initialized]
    cached = {buffer.dtype for layer in layers for buffer in (layer.keys, layer.values)}
    return 1e-3 if cached <= {torch.float32, torch.float64} else 0.1


@torch.no_grad()
def _compared(
    model: PreTrainedModel, role: str, window: int | None = None, spares_prompts: bool = False
) -> tuple[SlotCache, float]:
    """The cache of two ragged rows, past `window` if there is one, and how their logits differ from plain ones."""
    with in_eval_mode(model):
        try:
            cache = SlotCache(model.config, num_rows=2)
            cache.spares_prompts = spares_prompts
            texts = _texts(model, window)
            for row, text in enumerate(texts):
                cache.prompt_lengths[row] = len(text) - NUM_TAIL
            plain = _plain_logits if window is None else _generated_logits
            expected = [plain(model, text) for text in texts]
            actual = _ragged_logits(model, cache, texts)
        except Exception as error:  # models raise whatever they like about inputs that they do not expect
            raise RaggedError(
                f"The {role} `{type(model).__name__}` cannot run on ragged rows ({type(error).__name__}: {error})"
            ) from error
    difference = max(float((a - e).abs().max()) for a, e in zip(actual, expected))
    largest = max(float(e.abs().max()) for e in expected)
    return cache, difference / largest if largest > 0 else difference


def _texts(model: PreTrainedModel, window: int | None) -> list[list[int]]:
    num_ids = num_input_ids(model)
    limits = [n for n in (learned_positions(model), rope_switch(model)) if n is not None]
    longest = min([CHECKED_TOKENS if window is None else window + CHECKED_BEYOND, *limits])
    return [[(7 * i + 3) % num_ids for i in range(n)] for n in (longest, max(3, longest // 2))]


def _plain_logits(model: PreTrainedModel, text: list[int]) -> Tensor:
    """The scores after a text, of one pass without a cache."""
    token_ids = torch.tensor([text], device=execution_device(model))
    return model(input_ids=token_ids, use_cache=False).logits[0, -1].float()


def _generated_logits(model: PreTrainedModel, text: list[int]) -> Tensor:
    """The scores after a text whose tail is fed token by token, as `generate` does."""
    token_ids = torch.tensor([text], device=execution_device(model))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=token_ids[:, :-NUM_TAIL], cache=cache, use_cache=True)
    for index in range(-NUM_TAIL, 0):
        outputs = model(input_ids=token_ids[:, index : index + 1 or None], cache=cache, use_cache=True)
    return outputs.logits[0, -1].float()


def _ragged_logits(model: PreTrainedModel, cache: SlotCache, texts: list[list[int]]) -> Tensor:
    rows, device = slice(0, len(texts)), execution_device(model)
    heads, head_lengths = padded([text[:-NUM_TAIL] for text in texts], device)
    forward(model, cache, rows, heads, head_lengths)
    tails, tail_lengths = padded([text[-NUM_TAIL:] for text in texts], device)
    return forward(model, cache, rows, tails, tail_lengths).logits[:, -1].float()


@contextmanager
def in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    flags = {module: module.training for module in model.modules() if module.training}
    try:
        for module in flags:
            module.training = False
        yield
    finally:
        for module, training in flags.items():
            module.training = training
