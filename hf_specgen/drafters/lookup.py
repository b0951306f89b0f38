"""PromptLookupDrafter: candidates from a row's own text, by n-gram."""

from torch import Tensor
from transformers.utils import ModelOutput

from ..arguments import check_count
from ..engine.batch import Rows, padded
from ..engine.drafter import Drafter
from ..engine.request import Request
from ..engine.verification import Candidates


class PromptLookupDrafter(Drafter):
    """
    Proposes what followed the latest earlier occurrence of the row's last tokens (Saxena 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding). Needs no model and costs next to nothing.

    Args:
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            Candidates per round. A repetition that reaches the end of the text is continued periodically.
        max_ngram_size (`int`, *optional*, defaults to 3):
            The longest run of last tokens that is looked for; shorter ones are tried after it.

    Raises:
        `ValueError` or `TypeError`: if a number is not an int of at least 1.
    """

    def __init__(self, num_assistant_tokens: int = 5, max_ngram_size: int = 3):
        self.num_assistant_tokens = check_count("num_assistant_tokens", num_assistant_tokens)
        self.max_ngram_size = check_count("max_matching_ngram_size", max_ngram_size)

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
            request.state["ngram_index"] = _NgramIndex(self.max_ngram_size)
        index: _NgramIndex = request.state["ngram_index"]
        index.extend(request.committed_from(len(index.ids)))
        start = index.find()
        if start is None:
            return []
        block: list[int] = []
        while len(block) < count:
            position = start + len(block)
            block.append(index.ids[position] if position < len(index.ids) else block[position - len(index.ids)])
            if block[-1] in request.rules.eos_token_ids:
                break
        return block


class _NgramIndex:
    """Where each n-gram of a growing text was last followed by a token."""

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.ids: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it

    def extend(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            end = len(self.ids)
            for size in range(1, min(self.max_size, end) + 1):
                self._next[tuple(self.ids[end - size :])] = end
            self.ids.append(token_id)

    def find(self) -> int | None:
        """The index of the token that followed the latest earlier occurrence of the longest known ending."""
        for size in range(min(self.max_size, len(self.ids)), 0, -1):
            start = self._next.get(tuple(self.ids[-size:]))
            if start is not None:
                return start
        return None
