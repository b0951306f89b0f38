"""
A straightforward DSpark loop, as the baseline that the package's own has to beat: one prompt, greedy, transformers'
dynamic caches that are cropped after every round, decisions taken on the host.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specgen import DSparkModel
from hf_specgen.engine import hidden_state_indices


@torch.no_grad()
def reference_generate(
    target: PreTrainedModel, draft: DSparkModel, prompt_ids: list[int], max_new_tokens: int, eos_ids: frozenset[int]
) -> list[int]:
    """The tokens that follow a prompt, at most `max_new_tokens`, ending with one of `eos_ids` if it comes."""
    device = target.device
    cache, draft_cache = DynamicCache(config=target.config), DynamicCache(config=draft.config)
    outputs = target(torch.tensor([prompt_ids], device=device), cache=cache, output_hidden_states=True)
    features = tapped(draft, outputs.hidden_states)
    generated = [int(outputs.logits[0, -1].argmax())]
    while len(generated) < max_new_tokens and generated[-1] not in eos_ids:
        start = len(prompt_ids) + len(generated) - 1
        candidate_ids = drafted(draft, target, draft_cache, features, generated[-1], start)
        candidate_ids = candidate_ids[: max_new_tokens - len(generated) - 1]
        input_ids = torch.tensor([[generated[-1], *candidate_ids]], device=device)
        position_ids = torch.arange(start, start + input_ids.shape[1], device=device)[None]
        outputs = target(input_ids, position_ids=position_ids, cache=cache, output_hidden_states=True)
        best_ids = outputs.logits[0].argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(candidate_ids) and candidate_ids[accepted] == best_ids[accepted]:
            accepted += 1
        cache.crop(accepted - len(candidate_ids))
        features = tapped(draft, outputs.hidden_states)[:, : accepted + 1]
        new_ids = [*candidate_ids[:accepted], best_ids[accepted]]
        end = next((index + 1 for index, token_id in enumerate(new_ids) if token_id in eos_ids), len(new_ids))
        generated += new_ids[:end]
    return generated


def tapped(draft: DSparkModel, hidden_states: tuple[Tensor, ...]) -> Tensor:
    """The states that the drafter reads, side by side."""
    return torch.cat([hidden_states[i] for i in hidden_state_indices(draft.config.target_layer_ids)], dim=-1)


def drafted(
    draft: DSparkModel, target: PreTrainedModel, cache: DynamicCache, features: Tensor, anchor_id: int, start: int
) -> list[int]:
    """The candidates of one block whose anchor stands at index `start`."""
    config = draft.config
    num_new = features.shape[1]
    draft.write_context(features, cache, torch.arange(start - num_new, start, device=features.device)[None])
    block_ids = torch.tensor([[anchor_id] + [config.mask_token_id] * (config.block_size - 1)], device=features.device)
    position_ids = torch.arange(start, start + config.block_size, device=features.device)[None]
    states = draft(block_ids, position_ids, cache=cache, target=target).last_hidden_state
    cache.crop(-config.block_size)
    states = states if config.sample_from_anchor else states[:, 1:]
    chosen_ids: list[int] = []

    def choose(index: int, logits: Tensor) -> Tensor:
        chosen_ids.append(int(logits[0].argmax()))
        return torch.tensor(chosen_ids[-1:], device=logits.device)

    draft.unroll(states, draft.base_logits(states, target), block_ids[:, 0], choose, has_confidence=False)
    return chosen_ids
