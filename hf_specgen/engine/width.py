"""DraftLengthPolicy: the contract of what decides how many candidates each row verifies.

Whether a candidate is verified may depend on the candidates before it, never on itself or later ones: verification
is exact only then.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class DraftLengthPolicy(ABC):
    """
    Decides how many candidates each row verifies.

    Whether candidate `i` of a row is verified may depend on the candidates before it and on the confidences up to its
    own, but not on those of later positions, which know candidate `i`: choosing by them would favour some tokens over
    others. For the same reason the confidence in candidate `i` has to be computed without it. A probability that the
    draft gave to a token that it sampled is no such confidence.

    Attributes:
        needs_confidence (`bool`): whether `lengths` reads `confidences`.
    """

    needs_confidence: bool

    @abstractmethod
    def lengths(self, confidences: Tensor | None, limits: Tensor, is_live: Tensor) -> Tensor:
        """
        The number of candidates to verify in each row; copies from the device at most once.

        Args:
            confidences (`torch.FloatTensor` of shape `(rows, k)`, *optional*):
                Column `i` is the probability that candidate `i` is accepted if those before it are. May be None if
                `needs_confidence` is False.
            limits (`torch.LongTensor` of shape `(rows,)`, on the CPU):
                The most candidates that a row may verify, up to `k`; 0 in empty slots.
            is_live (`torch.BoolTensor` of shape `(rows,)`, on the CPU):
                Which slots are taken. Such a row costs a token of the pass even when its limit is 0.

        Returns:
            `torch.LongTensor` of shape `(rows,)`, on the CPU, from 0 to `limits`.
        """
