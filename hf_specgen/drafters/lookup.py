"""PromptLookupDrafter: candidates from a row's own text, by n-gram."""

from torch import Tensor
from transformers.utils import ModelOutput

from ..arguments import check_count
from ..engine.batch import Rows, padded
from ..engine.drafter import MAX_CANDIDATES, Drafter
from ..engine.request import Request
from ..engine.verification import Candidates


class PromptLookupDrafter(Drafter):
    """
    Proposes what followed the latest earlier occurrence of the row's last tokens (Saxena 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding). Needs no model and costs next to nothing.

    Args:
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            Candidates per round, at most 63. A repetition that reaches the end of the text is continued periodically.
        max_ngram_size (`int`, *optional*, defaults to 3):
            The longest run of last tokens that is looked for; shorter ones are tried after it.

    Raises:
        `ValueError` or `TypeError`: if a number is not an int in its range.
    """

    def __init__(self, num_assistant_tokens: int = 5, max_ngram_size: int = 3):
        self.num_assistant_tokens = check_count("num_assistant_tokens", num_assistant_tokens, maximum=MAX_CANDIDATES)
        self.max_ngram_size = check_count("max_matching_ngram_size", max_ngram_size)

    def __repr__(self) -> str:
        settings = f"num_assistant_tokens={self.num_assistant_tokens}, max_ngram_size={self.max_ngram_size}"
        return f"PromptLookupDrafter({settings})"

    def make_cache(self, rows: int) -> None:
        return None

    def observe(self, rows: Rows, candidates: Candidates, outputs: ModelOutput) -> None:
        pass

    def draft(self, rows: Rows, max_tokens: Tensor) -> Candidates:
        blocks: list[list[int]] = [[] for _ in range(rows.num_spanned)]
        for row, request in rows.live():
            blocks[row] = self._look_up(request, min(self.num_assistant_tokens, int(max_tokens[row])))
        token_ids, lengths = padded(blocks, rows.device)
        return Candidates(token_ids, lengths)

    def _look_up(self, request: Request, count: int) -> list[int]:
        if "ngram_index" not in request.state:
            request.state["ngram_index"] = _NgramIndex(request, self.max_ngram_size)
        start = request.state["ngram_index"].find()
        if start is None:
            return []
        period = request.num_committed - start  # where the text ends, it is continued with what was just proposed
        known = request.committed_from(start, count)
        block: list[int] = []
        while len(block) < count:
            block.append(known[len(block)] if len(block) < len(known) else block[len(block) - period])
            if block[-1] in request.rules.eos_token_ids:
                break
        return block


class _NgramIndex:
    """Where each n-gram of a request's text was last followed by a token."""

    def __init__(self, request: Request, max_size: int):
        self._request = request
        self._num_read = 0
        self._ending: tuple[int, ...] = ()  # the last `max_size` ids that were read
        self._max_size = max_size
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it

    def find(self) -> int | None:
        """The index of the token that followed the latest earlier occurrence of the longest known ending."""
        for token_id in self._request.committed_from(self._num_read):
            for size in range(1, len(self._ending) + 1):
                self._next[self._ending[-size:]] = self._num_read
            self._ending = (*self._ending, token_id)[-self._max_size :]
            self._num_read += 1
        for size in range(len(self._ending), 0, -1):
            if (start := self._next.get(self._ending[-size:])) is not None:
                return start
        return None
