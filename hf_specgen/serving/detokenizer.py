"""From ids to text, one token at a time: no half characters, no stop strings.

Knows a tokenizer, but no model, request or loop.
"""

from collections import deque
from collections.abc import Collection, Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from ..arguments import shown
from .stop_finder import StopFinder, stop_finder

REPLACEMENT = "\ufffd"  # what bytes that are no character decode to
NUM_CONTEXT = 8  # ids of the prompt, or of broken text, that new ids are decoded with
MAX_PENDING = 16  # ids that may wait for the end of a character
MAX_OPEN = 3  # bytes that may still become a character
FALLBACK_TOKEN = "<0xE2>"  # what sentencepiece calls a byte


class TextAssembler:
    """
    Turns the ids of one row into text, token by token. A piece of text is emitted once it is final: it holds no
    character of which bytes may be missing, and neither a stop string nor what may become one. The pieces joined are
    `tokenizer.decode` of all ids, up to the stop string that begins first. (One exception: where a vocabulary falls
    back to bytes, `decode` spoils a whole run of them for one that fits nowhere; here the characters before it stay.)
    Each token costs the same, however long the text is.

    It is fed by `add` and `finish`, or follows a row that is decoded in blocks by `first_stop` and `pop_text`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Decodes ids. Spaces are not cleaned up.
        stop (`Sequence[str]`, *optional*, defaults to `()`):
            Texts that end the row. They count as text: a special token that is skipped is no part of it.
        prompt_ids (`Sequence[int]`, *optional*, defaults to `()`):
            What the row goes on from. Tokenizers that drop a space at the start of a text keep it behind a prompt.
        skip_special_tokens (`bool`, *optional*, defaults to `True`):
            Whether special tokens are left out of the text.
        end_ids (`Collection[int]`, *optional*, defaults to `()`):
            Ids that end the row. Like a stop string they are no part of the text, even if they are ordinary tokens.
        min_tokens (`int`, *optional*, defaults to 0):
            A stop string counts only if it is complete after so many tokens, wherever it begins.

    Attributes:
        num_tokens (`int`): ids taken in so far.
        num_text_tokens (`int`): the ids that `text` needs: with so many leading ones, and not with fewer, all of
            `text` was decoded and no byte of it missing. Those that hold only a stop string or what follows it do
            not count, nor do skipped tokens at the end.
        stop_string (`str`, *optional*): what ended the text.

    Raises:
        `ValueError`: for a stop string that is empty.
        `TypeError`: for stop strings that are no sequence of texts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        end_ids: Collection[int] = (),
        min_tokens: int = 0,
    ):
        if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(s, str) for s in stop):
            raise TypeError(f'`stop` has to be a sequence of texts, such as ["###"], but is {shown(stop)}.')
        if "" in stop:
            raise ValueError(f"`stop` has to hold no empty text, which would end every row at once: {shown(stop)}.")
        self._stop = tuple(stop)
        self._decoder = _IncrementalDecoder(tokenizer, prompt_ids, skip_special_tokens)
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self.restart()

    @cached_property
    def _finder(self) -> StopFinder:
        """Made when there is text: rows that wait need none."""
        return stop_finder(self._stop)

    def restart(self) -> None:
        """Forgets all tokens and their text."""
        self._decoder.restart()
        self.num_tokens = 0
        self.num_text_tokens = 0
        self.stop_string: str | None = None
        self._pieces: list[str] = []
        self._num_popped = 0  # pieces
        self._state = 0  # of the finder
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._num_decoded = 0  # characters
        self._num_final = 0  # characters
        # Per token that brought text the number of characters with it, from the token on that `text` ends in.
        self._lengths: deque[tuple[int, int]] = deque()

    @property
    def text(self) -> str:
        """All final text so far."""
        return "".join(self._pieces)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_string is not None

    def add(self, token_id: int) -> str:
        """Takes in the next token and returns the text that became final with it. After a stop string it is empty."""
        self.num_tokens += 1
        if self.is_stopped:
            return ""
        if token_id in self._end_ids:
            self._decoder.num_left_out += 1
            return ""
        return self._accept(self._decoder.add(token_id), self.num_tokens)

    def finish(self) -> str:
        """Ends the row and returns what was held back."""
        if self.is_stopped:
            return ""
        last_token = self.num_tokens - self._decoder.num_left_out
        final = self._accept(self._decoder.finish(), last_token)
        if self.is_stopped:
            return final
        self._state = 0
        return final + self._emit(len(self._held))

    def first_stop(self, token_ids_so_far: list[int], new_token_ids: list[int]) -> int | None:
        """
        How many of the new tokens it takes to complete a stop string.

        Args:
            token_ids_so_far (`list[int]`): All that the row has generated and committed.
            new_token_ids (`list[int]`): What may be committed next, or rolled back, as a whole or from some token on.

        Returns:
            The number of new tokens, at least 1, or None if no stop string is complete.
        """
        self._follow(token_ids_so_far)
        for count, token_id in enumerate(new_token_ids, start=1):
            self.add(token_id)
            if self.is_stopped:
                return count
        return None

    def pop_text(self, token_ids: list[int], is_finished: bool = False) -> str:
        """
        The text that became final since the last call.

        Args:
            token_ids (`list[int]`): All that the row has generated and committed.
            is_finished (`bool`, *optional*, defaults to `False`): Whether the row has ended.
        """
        self._follow(token_ids)
        if is_finished:
            self.finish()
        piece = "".join(self._pieces[self._num_popped :])
        self._num_popped = len(self._pieces)
        return piece

    def _follow(self, token_ids: list[int]) -> None:
        """Starts again from `token_ids` if more or fewer were taken in: some were rolled back."""
        if self.num_tokens == len(token_ids):
            return
        popped = "".join(self._pieces[: self._num_popped])
        self.restart()
        for token_id in token_ids:
            self.add(token_id)
        if popped:
            self._pieces = [popped, self.text[len(popped) :]]
            self._num_popped = 1

    def _accept(self, piece: str, token: int) -> str:
        """Takes in decoded text that came with the `token`th token, and returns what is final now."""
        earliest = self._num_decoded + len(piece)
        for end, character in enumerate(piece, start=self._num_decoded + 1):
            self._state = self._finder.step(self._state, character)
            found = self._finder.stops[self._state]
            if found is not None and token > self._min_tokens and end - len(found) < earliest:
                earliest, self.stop_string = end - len(found), found
        self._held += piece
        if piece:
            self._num_decoded += len(piece)
            self._lengths.append((token, self._num_decoded))
        if self.is_stopped:
            return self._emit(earliest - self._num_final)
        return self._emit(len(self._held) - self._finder.depths[self._state])

    def _emit(self, count: int) -> str:
        """Makes `count` of the characters held final."""
        final, self._held = self._held[:count], self._held[count:]
        if final:
            self._pieces.append(final)
            self._num_final += count
            while self._lengths[0][1] < self._num_final:
                self._lengths.popleft()
            self.num_text_tokens = self._lengths[0][0]
        return final


class _IncrementalDecoder:
    """
    Ids -> text that no later id changes. A short window of ids is decoded with each new one, and the text that it had
    before is taken off. The window begins with ids whose text was emitted, so that a decoder that drops a space at
    the start of a text has done so there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        # Where bytes are joined before they are decoded, all that is missing is in the last replacement character.
        # A vocabulary that falls back to bytes has one per byte.
        fallback_id = tokenizer.convert_tokens_to_ids(FALLBACK_TOKEN)
        falls_back = fallback_id is not None and tokenizer.convert_ids_to_tokens(fallback_id) == FALLBACK_TOKEN
        self._max_open = MAX_OPEN if falls_back else 1
        for num_context in range(NUM_CONTEXT, NUM_CONTEXT + MAX_OPEN + 1):
            self._prompt_end = list(prompt_ids[-num_context:])
            if REPLACEMENT not in self._decode(self._prompt_end):
                break  # begins with a whole character
        self.restart()

    def restart(self) -> None:
        """Forgets all ids but the prompt's."""
        self._window = list(self._prompt_end)
        self._num_read = len(self._window)  # ids whose text was emitted
        self._text = self._decode(self._window)
        self._known = self._text  # the beginning of it that was emitted
        self.num_left_out = 0  # ids in a row, the latest ones, that are no part of the text

    def add(self, token_id: int) -> str:
        """Takes in the next id and returns the text that is final with it."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text and self._is_left_out(token_id):
            self._window.pop()
            self.num_left_out += 1
            return ""
        self.num_left_out = 0
        self._text = text
        num_pending = len(self._window) - self._num_read
        if not text.startswith(self._known):
            # A first byte spoils a whole run of bytes until its character is whole. Emitted text is kept.
            self._window = self._window[self._num_read :]
            self._num_read = 0
            self._text = self._decode(self._window)
            self._known = ""
        num_open = min(self._num_open(), len(self._text) - len(self._known))
        end = len(self._text) - num_open
        piece = self._text[len(self._known) : end]
        self._known = self._text[:end]
        if piece and num_open == 0:
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._known = self._text = self._decode(self._window)
        elif num_pending > MAX_PENDING:
            self._window = self._window[-NUM_CONTEXT:]
            self._num_read = NUM_CONTEXT - num_open
            self._text = self._decode(self._window)
            self._known = self._text[: max(0, len(self._text) - num_open)]
        return piece

    def finish(self) -> str:
        """Returns what was held back, as no more ids follow."""
        piece, self._known = self._text[len(self._known) :], self._text
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)

    def _is_left_out(self, token_id: int) -> bool:
        """Whether `decode` ignores the id: a special token, or one that the tokenizer does not know."""
        if self._tokenizer.convert_ids_to_tokens(token_id) is None:
            return True
        is_blank = self._decode([token_id]) == ""
        return is_blank and self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False) != ""

    def _num_open(self) -> int:
        """Replacement characters at the end that later ids may complete."""
        num_trailing = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        return min(num_trailing, self._max_open)
