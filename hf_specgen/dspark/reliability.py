"""How far probabilities of being kept agree with what was kept. Knows tensors only."""

import torch
from torch import Tensor

NUM_BINS = 20


def reliability_bins(probabilities: Tensor, labels: Tensor) -> Tensor:  # (..., samples), (samples,) -> (..., 3, bins)
    """For `NUM_BINS` bins of equal width: the number of samples, the sum of probabilities and the sum of labels."""
    probabilities = probabilities.double()
    index = (probabilities * NUM_BINS).long().clamp(max=NUM_BINS - 1)[..., None, :]
    labels = labels.double().expand_as(probabilities)
    values = torch.stack([torch.ones_like(probabilities), probabilities, labels], dim=-2)
    return values.new_zeros(*values.shape[:-1], NUM_BINS).scatter_add(-1, index.expand_as(values), values)


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> Tensor:  # (..., samples), (samples,) -> (...)
    """Mean over the samples of the gap between mean probability and share of true labels in a sample's bin."""
    _, predicted, observed = reliability_bins(probabilities, labels).unbind(dim=-2)
    return (predicted - observed).abs().sum(dim=-1) / len(labels)


def brier_score(probabilities: Tensor, labels: Tensor) -> Tensor:  # (samples,), (samples,) -> ()
    """Mean squared distance of probability and label."""
    return (probabilities.double() - labels.double()).square().mean()


def auroc(probabilities: Tensor, labels: Tensor) -> float | None:  # (samples,), (samples,)
    """
    The area under the ROC curve, exactly: how often a true label has a higher probability than a false one, ties
    counting half. None if all labels are equal.
    """
    labels = labels.bool()
    num_true = int(labels.sum())
    num_pairs = num_true * (len(labels) - num_true)
    if num_pairs == 0:
        return None
    _, index, counts = probabilities.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1) / 2  # equal probabilities share their mean rank
    return (float(ranks[index[labels]].sum()) - num_true * (num_true + 1) / 2) / num_pairs
