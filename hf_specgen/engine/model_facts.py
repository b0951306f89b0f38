"""What a model's modules and configuration say of its ids, its positions and its device, and whether requests fit.

Each fact is read here and nowhere else.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from .request import Request

MAX_PADDING = 1024  # ids by which vocabularies of one tokenizer may differ, unless the tokenizer is there to tell
NO_EOS = -1  # how transformers writes "no end" as an id


def vocab_size(model: PreTrainedModel) -> int:
    """How many ids the model scores."""
    return model.config.get_text_config(decoder=True).vocab_size


def num_input_ids(model: PreTrainedModel) -> int:
    """How many ids the model's input embeddings know; some have more than the head scores."""
    return model.get_input_embeddings().num_embeddings


def context_length(model: PreTrainedModel) -> int | None:
    """How many positions the model was made for, None if its configuration does not say."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return config.get("max_position_embeddings") or config.get("n_positions")


def learned_positions(model: PreTrainedModel) -> int | None:
    """The context length of a model whose positions end there (a table of embeddings), None for other encodings."""
    limit = context_length(model)
    for name, module in model.named_modules():
        is_learned = isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions")
        has_table = "embed_positions" in dict(module.named_buffers(recurse=False))  # sinusoids up to the same limit
        if limit is not None and (is_learned or has_table):
            return limit
    return None


def execution_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its inputs: for weights that accelerate offloads not the device on which they lie."""
    hook = vars(model.get_input_embeddings()).get("_hf_hook")
    hooks = [hook, *(vars(hook).get("hooks", ()) if hook is not None else ())]
    for entry in hooks:
        device = None if entry is None else vars(entry).get("execution_device")
        if device is not None:
            return torch.device(device)
    return model.device


def eos_ids(eos_token_id: int | list[int] | None) -> frozenset[int]:
    """The ids that a generation config's `eos_token_id` names."""
    if eos_token_id is None:
        return frozenset()
    ids = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
    return frozenset(ids) - {NO_EOS}


def check_vocab_sizes(target_size: int, draft_size: int, num_tokens: int | None = None) -> None:
    """
    Lets pass vocabularies of one tokenizer that are padded to different sizes.

    Args:
        target_size, draft_size (`int`): the vocabularies.
        num_tokens (`int`, *optional*): how many tokens their tokenizer has, if that is known.

    Raises:
        `ValueError`: naming the sizes.
    """
    if num_tokens is not None:
        is_one_tokenizer = target_size == draft_size or num_tokens <= min(target_size, draft_size)
    else:
        largest = max(target_size, draft_size)
        is_one_tokenizer = abs(target_size - draft_size) <= min(MAX_PADDING, largest // 5)
    if not is_one_tokenizer:
        raise ValueError(
            f"The target has a vocabulary of {target_size} ids and the draft one of {draft_size}: these are no "
            "paddings of one tokenizer. For a draft with another tokenizer pass `tokenizer=` and "
            "`assistant_tokenizer=`."
        )


def check_ids(model: PreTrainedModel, request: Request) -> None:
    """Raises `ValueError` if a request names ids outside the model's vocabulary."""
    num_ids = num_input_ids(model)
    if (largest := max(request.prompt_ids)) >= num_ids:
        raise ValueError(f"`prompt_ids` holds {largest}, but the model's vocabulary has {num_ids} ids.")
    if outside := [i for i in request.rules.eos_token_ids if not 0 <= i < vocab_size(model)]:
        raise ValueError(f"`eos_token_ids` holds {outside}, but the model's vocabulary has {vocab_size(model)} ids.")


def check_positions(model: PreTrainedModel, requests: Iterable[Request], role: str = "target") -> None:
    """
    Refuses requests whose prompt and budget leave the range in which the model's position encoding is exact.

    Raises:
        `ValueError`: naming the numbers.
    """
    ranges = [(len(request.prompt_ids), len(request.prompt_ids) + request.max_new_tokens) for request in requests]
    longest = max((end for _, end in ranges), default=0)
    limit = learned_positions(model)
    if limit is not None and longest > limit:
        raise ValueError(
            f"Prompt and budget come to {longest} tokens, but the {role} has learned positions for {limit}. "
            "Lower `max_new_tokens` or shorten the prompt."
        )
    switch = rope_switch(model)
    if switch is None or longest <= switch:
        return
    kinds = _rope_types(model)
    if "dynamic" in kinds or any(start <= switch for start, _ in ranges):
        raise ValueError(
            f"The {role}'s {'/'.join(sorted(kinds))} position encoding changes for all tokens when a row passes "
            f"{switch} tokens, and prompt and budget come to {longest}. Keep every row on one side of it."
        )


def longest_row(model: PreTrainedModel, prompt_length: int) -> int | None:
    """The most tokens that a prompt of this length and its text can have together, None if nothing bounds them."""
    switch = rope_switch(model)
    limits = [learned_positions(model), switch if switch is not None and prompt_length <= switch else None]
    return min((limit for limit in limits if limit is not None), default=None)


def rope_switch(model: PreTrainedModel) -> int | None:
    """The sequence length at which the rotary frequencies change, None if they do not."""
    if not _rope_types(model):
        return None
    config = model.config.get_text_config(decoder=True).to_dict()
    parameters = config["rope_parameters"]
    return (
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )


def _rope_types(model: PreTrainedModel) -> set[str]:
    parameters = model.config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {entry.get("rope_type", "default") for entry in nested} & {"longrope", "dynamic"}
