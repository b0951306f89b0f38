"""The chi-square test of sampled tokens, and the distribution that a verification has by definition."""

import itertools

import torch

NUM_DRAWS = 20_000


FALSE_ALARM = 1e-4


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How likely counts that are at least as far from `probs` are; outcomes expected less than 5 times are pooled."""
    expected = probs.double() * counts.sum()
    is_rare = expected < 5
    assert counts[probs == 0].sum() == 0, "an outcome of probability 0 was drawn"
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]]).double()
    expected, counts = expected[expected > 1e-9], counts[expected > 1e-9]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def target_probs(candidates, probs, num_accepted, is_refused):
    return probs[torch.arange(len(probs)), num_accepted]


@torch.no_grad()
def continuation_probs(model, process, prompt: list[int], length: int) -> torch.Tensor:
    """The probabilities of all continuations of a prompt, exactly, in the order of `itertools.product`."""
    probs = torch.ones(1)
    for end in range(length):
        ids = list(itertools.product(range(model.config.vocab_size), repeat=end))
        continuations = torch.tensor(ids, dtype=torch.long)
        prefixes = torch.cat([torch.tensor(prompt).expand(len(continuations), -1), continuations], dim=1)
        scores = process(prefixes, model(input_ids=prefixes).logits[:, -1])
        probs = (probs[:, None] * scores.softmax(dim=-1)).flatten()
    return probs
