"""Stopping criteria; most remember what they were called with."""

import torch
from transformers import StoppingCriteria


class EndsWithOneOf(StoppingCriteria):
    def __init__(self, *token_ids):
        self.token_ids = torch.tensor(token_ids)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.token_ids)


class CountsCalls(StoppingCriteria):
    """Ends all rows at its call number `last`."""

    def __init__(self, last):
        self.last, self.num_calls = last, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        return torch.full((len(input_ids),), self.num_calls >= self.last)


class EndsRowsOnceSeen(StoppingCriteria):
    """A flag for each row in a tensor, set by its last id; ends the rows that have theirs."""

    def __init__(self, *token_ids):
        self.token_ids, self.has_seen = torch.tensor(token_ids), None

    def __call__(self, input_ids, scores, **kwargs):
        found = torch.isin(input_ids[:, -1], self.token_ids)
        self.has_seen = found if self.has_seen is None else self.has_seen | found
        return self.has_seen


class EndsAllOnceSeen(StoppingCriteria):
    """Ends the batch when each row has had one of some ids somewhere, as one boolean."""

    def __init__(self, *token_ids):
        self.token_ids, self.rows = set(token_ids), {}

    def __call__(self, input_ids, scores, **kwargs):
        for row, ids in enumerate(input_ids.tolist()):
            self.rows[row] = self.rows.get(row, False) or ids[-1] in self.token_ids
        return all(self.rows.values())


class EndsOnRepetition(StoppingCriteria):
    """Keeps every text that it has seen, and ends a row whose last two ids stood there before."""

    def __init__(self):
        self.pairs = {}

    def __call__(self, input_ids, scores, **kwargs):
        done = []
        for row, ids in enumerate(input_ids.tolist()):
            pair = tuple(ids[-2:])
            seen = self.pairs.setdefault(row, [])
            done.append(pair in seen)
            seen.append(pair)
        return torch.tensor(done)
