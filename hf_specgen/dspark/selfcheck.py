"""Why is nothing accepted? Drafts for a few prompts as configured and with each usual mistake undone.

Nothing fails when a drafter is loaded with shifted layer ids or the wrong layout of slots: the output stays exact, and
only the speed is gone.
"""

import copy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.decoder import Decoder
from ..engine.model_facts import eos_ids
from ..engine.request import Request
from ..engine.rules import DecodingRules
from ..prompts import encode_prompt, load_prompts
from .drafter import DSparkDrafter
from .modeling import DSparkModel

NUM_PROMPTS = 4
MAX_NEW_TOKENS = 32
MAX_MASK_TOKENS = 8
GOOD_SHARE = 0.5  # of the most tokens that a round can yield, from which nothing is searched for
POOR_LENGTH = 1.3  # tokens per round that need an explanation
CLEAR_GAIN = 1.15  # by which another setting has to be better to be named


@dataclass(frozen=True)
class DSparkCheck:
    """
    What a check of a drafter found; print it.

    Args:
        mean_accepted_length (`float`): tokens per round on the prompts, greedy; 1.0 is no gain.
        alternatives (`dict[str, float]`): the same with one setting changed, where that was tried.
        findings (`tuple[str, ...]`): what is wrong, in sentences; empty if nothing was found.
    """

    mean_accepted_length: float
    alternatives: dict[str, float]
    findings: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.mean_accepted_length:.2f} tokens per round"]
        lines += [f"{length:.2f} with {name}" for name, length in self.alternatives.items()]
        return "\n".join([*lines, *(self.findings or ["Nothing wrong was found."])])


def check_drafter(
    model: DSparkModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str] | None = None,
) -> DSparkCheck:
    """
    Drafts for a few prompts and, if a round yields less than half of what a block could, tries other settings.

    Args:
        model ([`DSparkModel`]):
            The drafter.
        target ([`~transformers.PreTrainedModel`]):
            The model to draft for.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`list[str]`, *optional*):
            Texts of the kind that the drafter was trained for; some built-in ones by default.

    Raises:
        `ValueError`: if the drafter is not for this target.
    """
    model.check_target(target)
    if prompts is None:
        turns = [prompt.turns for prompt in load_prompts("builtin", None, NUM_PROMPTS)]
    else:
        turns = [(prompt,) for prompt in prompts]
    prompt_ids = [encode_prompt(tokenizer, turn) for turn in turns]
    findings = [
        f"`{name}` differs from the target's: the drafter was made for another target, or for this one before it was "
        "trained further."
        for name in model.foreign_tables(target)
    ]
    length = _mean_accepted_length(model, target, prompt_ids)
    if length >= GOOD_SHARE * (model.config.block_size + 1):
        return DSparkCheck(length, {}, tuple(findings))
    alternatives = {
        name: _mean_accepted_length(variant, target, prompt_ids)
        for name, variant in _variants(model, target, tokenizer).items()
    }
    better = {name: other for name, other in alternatives.items() if other >= CLEAR_GAIN * length}
    if better:
        best = max(better, key=lambda name: better[name])
        findings.append(
            f"With {best} it drafts {better[best]:.2f} instead of {length:.2f} tokens per round: use that."
        )
    elif length < POOR_LENGTH:
        findings.append(
            "No other setting helps. The drafter may be untrained, made for another target, or trained on other kinds "
            "of prompts or another chat template."
        )
    return DSparkCheck(length, alternatives, tuple(findings))


def _mean_accepted_length(model: DSparkModel, target: PreTrainedModel, prompts: list[list[int]]) -> float:
    decoder = Decoder(target, DSparkDrafter(model), max_batch_size=len(prompts))
    rules = DecodingRules(eos_token_ids=eos_ids(target.generation_config.eos_token_id))
    for _ in decoder.run([Request(ids, MAX_NEW_TOKENS, rules) for ids in prompts]):
        pass
    return decoder.stats.mean_accepted_length


def _variants(
    model: DSparkModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, DSparkModel]:
    """The drafter with one setting changed, by what was changed."""
    config = model.config
    changes: dict[str, dict[str, Any]] = {}
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    for shift in (-1, 1):
        layer_ids = [layer + shift for layer in config.target_layer_ids]
        if layer_ids[0] >= -1 and layer_ids[-1] < depth - 1:
            changes[f"`target_layer_ids` {layer_ids}"] = {"target_layer_ids": layer_ids}
    if config.block_size > 1:
        is_other = not config.sample_from_anchor
        changes[f"`sample_from_anchor` {is_other}"] = {"sample_from_anchor": is_other}
    for token_id in _likely_mask_tokens(tokenizer, config.vocab_size):
        if token_id != config.mask_token_id:
            changes[f"`mask_token_id` {token_id}"] = {"mask_token_id": token_id}
    variants = {}
    for name, change in changes.items():
        variant = copy.copy(model)
        variant.config = copy.copy(config)
        for field, value in change.items():
            setattr(variant.config, field, value)
        variants[name] = variant
    return variants


def _likely_mask_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """A mask token of the tokenizer, the first ids behind its own, its other special ids, the last id."""
    size = len(tokenizer)
    token_ids = [tokenizer.mask_token_id, size, size + 1, vocab_size - 1, tokenizer.pad_token_id]
    token_ids += tokenizer.all_special_ids
    likely = dict.fromkeys(i for i in token_ids if i is not None and 0 <= i < vocab_size)
    return list(likely)[:MAX_MASK_TOKENS]
