"""Calls of `generate`: options, a streamer that keeps what it gets, the generated ids."""

import string

import torch
from transformers import StoppingCriteria
from transformers.generation import BaseStreamer

from hf_specgen import (
    LogitBias,
    TokenPenalties,
)
from tests.support.models import (
    EOS,
    PAD,
    character_tokenizer,
)

TOKENIZER = character_tokenizer(string.ascii_letters + string.digits + "+-")  # as many as the models have ids


DICT_OUTPUT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def penalties() -> dict:
    return {"logits_processor": [TokenPenalties(1.3, 1.0, 0.5, pad_token_id=PAD), LogitBias({"7": 3.0, 9: -5.0})]}


OPTIONS = {
    "bare": lambda text: {},
    "penalties": lambda text: penalties(),
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 2},
    "min_new_tokens": lambda text: {"min_new_tokens": 12, "eos_token_id": [EOS, text[5]]},
    "stop_strings": lambda text: {
        "stop_strings": [TOKENIZER.decode(text[len(text) // 2 :][:2])],
        "tokenizer": TOKENIZER,
    },
}


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.puts, self.has_ended = [], False

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.has_ended = True


class StopsAfter(StoppingCriteria):
    """Ends a row at one of some ids, and all rows at a length."""

    def __init__(self, token_ids, length=None):
        self.token_ids, self.length = torch.tensor(token_ids), length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            return torch.ones(len(input_ids), dtype=torch.bool)
        return torch.isin(input_ids[:, -1], self.token_ids)


def generated(model, batch, num_tokens=24):
    """What plain `generate` makes of the first row."""
    return model.generate(**batch, max_new_tokens=num_tokens)[0, batch["input_ids"].shape[1] :].tolist()


class ForwardCount:
    """How many passes some models have run."""

    def __init__(self, *models):
        self.count = 0
        for model in models:
            model.register_forward_pre_hook(self.add)

    def add(self, *args):
        self.count += 1


def traced_text(stats, row):
    """The tokens of a row after its first one, which the prefill gave, put together from the trace."""
    text = []
    for trace in stats.traces:
        if trace.row == row:
            text += [*trace.proposed[: trace.num_accepted]]
            text += [] if trace.next_token_id is None else [trace.next_token_id]
    return text
