"""Completions as evaluations get them, for the tests of metrics and logs."""

from hf_specgen import Completion
from trainers import resolve_metrics


def completed(text="", index=0, ids=(), reason="eos", error=None) -> Completion:
    return Completion("prompt", text, tuple(ids), reason, index, error=error)


def failed(index=0) -> Completion:
    return completed(index=index, reason="error", error=RuntimeError("out of memory"))


def compute(metric, completions, references=None) -> dict[str, float]:
    """The numbers of one metric, in whatever form it is given."""
    (resolved,) = resolve_metrics([metric])
    return resolved.compute(completions, references)
