"""What a drafter does in the rounds of a decoder, and what it should compute."""

import random

import torch

from hf_specgen import DSparkModel, Request
from hf_specgen.layers.slot_cache import SlotCache
from tests.support.decoding import rules
from tests.support.models import VOCAB_SIZE


def tapped(model: DSparkModel, target, ids: list[int]) -> torch.Tensor:
    """What the target's tapped layers say of a text, by a plain pass."""
    states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1] for layer in model.config.target_layer_ids], dim=-1)


def block_after(model: DSparkModel, target, context: list[int], anchors: torch.Tensor) -> torch.Tensor:
    """The block states behind a context that was written at once."""
    cache, span, count = SlotCache(model.config, 1), slice(0, 1), torch.tensor([len(context)])
    write = cache.begin(span, count, len(context), torch.device("cpu"))
    model.write_context(tapped(model, target, context), cache, write.position_ids)
    cache.advance(span, count)
    return model.draft_block(target, cache, span, anchors)


def rounds_of(traces, row):
    return [(t.proposed, t.num_accepted, t.next_token_id) for t in traces if t.row == row]


class Blocks:
    """Records what a drafter drafts: the input of each pass, and the candidates of each block."""

    def __init__(self, monkeypatch):
        self.inputs, self.candidates = [], []
        forward, unroll = DSparkModel.forward, DSparkModel.unroll

        def recording_forward(model, input_ids, *args, **kwargs):
            self.inputs.append(input_ids.clone())
            return forward(model, input_ids, *args, **kwargs)

        def recording_unroll(model, states, base_logits, anchor_ids, choose, has_confidence=True):
            chosen = []

            def recording_choose(index, logits):
                chosen.append(choose(index, logits))
                return chosen[-1]

            confidences = unroll(model, states, base_logits, anchor_ids, recording_choose, has_confidence)
            self.candidates.append(torch.stack(chosen, dim=1))
            return confidences

        monkeypatch.setattr(DSparkModel, "forward", recording_forward)
        monkeypatch.setattr(DSparkModel, "unroll", recording_unroll)


def requests_for(count: int = 5) -> list[Request]:
    return [
        Request(random.Random(seed).choices(range(3, VOCAB_SIZE), k=1 + 3 * seed % 10), 16 + seed, rules())
        for seed in range(count)
    ]
