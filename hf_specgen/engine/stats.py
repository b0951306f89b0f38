"""DecodingStats: the counts of a run. Every rate is a property of the counts, so runs and ranks can be added up."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

PHASES = ("draft", "verify", "processors", "other")


@dataclass(frozen=True)
class RoundTrace:
    """
    One round of a request.

    Args:
        row (`int`): the row of the batch; in a [`Decoder`] the request's number in the order given.
        proposed (`tuple[int, ...]`): the candidates.
        num_accepted (`int`): how many of them were kept.
        next_token_id (`int`, *optional*): the token after those, None if the row ended before it.
    """

    row: int
    proposed: tuple[int, ...]
    num_accepted: int
    next_token_id: int | None


@dataclass(repr=False)
class DecodingStats:
    """
    Counts of a decoding run; `summary()` tells them in a sentence. In the counts of one request the passes and seconds
    are 0, since it shared them with others.

    Attributes:
        rounds (`int`): rounds of rows after their prefill; eight rows decoding side by side count eight per pass.
        drafting_rounds (`int`): those in which a draft model ran for the row or a candidate was verified.
        tokens (`int`): tokens emitted, prefill included.
        drafting_tokens (`int`): tokens emitted by drafting rounds.
        target_forwards, draft_forwards (`int`): forward passes, whatever the number of rows.
        proposed, judged, accepted (`Counter`): per position in the block, candidates proposed; those whose fate was
            decided (everything before them was kept and the row had not ended); those kept and emitted.
        seconds (`dict[str, float]`): wall time by phase: `draft`, `verify` (target passes), `processors` (scores and
            verification), `other`. On an accelerator this is the time of the host.
        traces (`list[RoundTrace]`): every round of every row, when asked for.
    """

    rounds: int = 0
    drafting_rounds: int = 0
    tokens: int = 0
    drafting_tokens: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    proposed: Counter[int] = field(default_factory=Counter)
    judged: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    traces: list[RoundTrace] = field(default_factory=list)

    def record_round(self, num_proposed: int, num_accepted: int, num_emitted: int, has_drafted: bool = False) -> None:
        """
        Counts one round of one row.

        Args:
            num_proposed (`int`): candidates verified.
            num_accepted (`int`): candidates kept by verification.
            num_emitted (`int`): tokens that the row took; fewer than `num_accepted + 1` in a row's last round.
            has_drafted (`bool`, *optional*, defaults to `False`): whether a draft model ran for the row, although
                perhaps none of its candidates were verified.
        """
        self.rounds += 1
        self.tokens += num_emitted
        if num_proposed == 0 and not has_drafted:
            return
        self.drafting_rounds += 1
        self.drafting_tokens += num_emitted
        self.proposed.update(range(num_proposed))
        self.accepted.update(range(min(num_accepted, num_emitted)))
        self.judged.update(range(min(num_accepted + 1, num_proposed, num_emitted)))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time that the block takes to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per drafting round: kept candidates plus the token after them; 1.0 is no gain."""
        return self.drafting_tokens / self.drafting_rounds if self.drafting_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Kept candidates over judged candidates."""
        return sum(self.accepted.values()) / sum(self.judged.values()) if self.judged else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per position: how often a candidate is kept when everything before it was."""
        return [self.accepted[i] / self.judged[i] for i in sorted(self.judged)]

    @property
    def survival(self) -> list[float]:
        """Per position: how often a proposed candidate ends up in the text."""
        return [self.accepted[i] / self.proposed[i] for i in sorted(self.proposed)]

    def __add__(self, other: "DecodingStats") -> "DecodingStats":
        if not isinstance(other, DecodingStats):
            return NotImplemented
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "seconds"}
        seconds = {phase: self.seconds[phase] + other.seconds[phase] for phase in PHASES}
        return DecodingStats(**summed, seconds=seconds)

    def summary(self) -> str:
        """The counts in a sentence, such as "96 tokens in 28 passes: 68 of 73 judged candidates kept (93%), ..."."""
        told = f"{_counted(self.tokens, 'token')} in "
        if self.target_forwards:
            told += _counted(self.target_forwards, "pass", "passes")
        else:
            told += f"{_counted(self.rounds, 'round')} after the prompt"
        if self.drafting_rounds:
            kept, judged = sum(self.accepted.values()), sum(self.judged.values())
            told += f": {kept} of {judged} judged candidates kept ({self.acceptance_rate:.0%})"
            told += f", {self.mean_accepted_length:.2f} tokens per drafting round"
        total = sum(self.seconds.values())
        if total:
            shares = {phase: seconds / total for phase, seconds in self.seconds.items()}
            told += f"; {total:.3g} s"
            told += "".join(f", {phase} {share:.0%}" for phase, share in shares.items() if share >= 0.01)
        return f"{told}."

    def __repr__(self) -> str:
        seconds = {phase: round(value, 3) for phase, value in self.seconds.items()}
        return (
            f"DecodingStats(tokens={self.tokens}, rounds={self.rounds}, drafting_rounds={self.drafting_rounds}, "
            f"target_forwards={self.target_forwards}, draft_forwards={self.draft_forwards}, "
            f"mean_accepted_length={self.mean_accepted_length:.2f}, acceptance_rate={self.acceptance_rate:.2f}, "
            f"seconds={seconds})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The counts and rates as plain numbers and lists, for JSON."""
        positions = sorted(self.proposed)
        return {
            "rounds": self.rounds,
            "drafting_rounds": self.drafting_rounds,
            "tokens": self.tokens,
            "target_forwards": self.target_forwards,
            "draft_forwards": self.draft_forwards,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "proposed": [self.proposed[i] for i in positions],
            "accepted": [self.accepted[i] for i in positions],
            "conditional_acceptance": self.conditional_acceptance,
            "survival": self.survival,
            "seconds": dict(self.seconds),
        }


def _counted(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
