"""Processors that fail, and processors that remember what they were called with."""

import torch
from transformers import LogitsProcessor


class Fails(LogitsProcessor):
    """Raises, or masks every token, as soon as a row has some length."""

    def __init__(self, length, kind):
        self.length, self.kind = length, kind

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.length:
            return scores
        if self.kind == "raises":
            raise RuntimeError("no luck")
        return torch.full_like(scores, -torch.inf)


class CoolsDown(LogitsProcessor):
    """A counter of calls: every third one forbids the best token."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return without_best(scores) if self.num_calls % 3 == 0 else scores


class ForbidsOnce(LogitsProcessor):
    """A flag for each row in a tensor: the first even id makes it forbid the best token from then on."""

    def __init__(self):
        self.flags = None

    def __call__(self, input_ids, scores):
        if self.flags is None:
            self.flags = torch.zeros(len(input_ids), dtype=torch.bool)
        self.flags |= input_ids[:, -1] % 4 == 0
        return torch.where(self.flags[:, None], without_best(scores), scores)


class RemembersScores(LogitsProcessor):
    """A list of what it gave: mixes the scores with those of its last call, row by row."""

    def __init__(self):
        self.given = []

    def __call__(self, input_ids, scores):
        if self.given:
            scores = scores + 0.5 * self.given[-1]
        self.given.append(scores.clone())
        return scores


class CachesText(LogitsProcessor):
    """A nested cache keyed by text: forbids the best token where the row's last id has been seen twice."""

    def __init__(self):
        self.cache = {"rows": {}}

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            seen = self.cache["rows"].setdefault(row, {})
            seen[ids[-1]] = seen.get(ids[-1], 0) + 1
            if seen[ids[-1]] % 2 == 0:
                scores[row] = without_best(scores[row][None])[0]
        return scores


def closure_with_memory():
    """A function whose memory is a variable of the function around it."""
    calls, total = [0], 0

    def process(input_ids, scores):
        nonlocal total
        calls[0] += 1
        total += calls[0]
        return without_best(scores) if total % 4 == 1 else scores

    return process


def without_best(scores):
    return scores.scatter(1, scores.argmax(dim=-1, keepdim=True), -torch.inf)


class SharesSeen(LogitsProcessor):
    """Forbids in all rows the ids that any row has had: rows that are not there yet would have to be known."""

    def __init__(self):
        self.seen = set()

    def __call__(self, input_ids, scores):
        self.seen.update(input_ids[:, -1].tolist())
        scores = scores.clone()
        scores[:, sorted(self.seen)] = -torch.inf
        return scores
