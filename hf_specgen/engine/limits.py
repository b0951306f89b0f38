"""CacheLimits: how much fits into the caches, and which requests and settings can never fit."""

from dataclasses import dataclass, fields

from ..arguments import check_count
from .request import Request

CANDIDATE_COLUMNS = 64  # behind prompt and budget: where candidates and padding go
MIN_TOKENS = 2  # of the shortest request: a prompt of one token, and one to generate


@dataclass(frozen=True)
class CacheLimits:
    """
    How much may be in the cache, and how much goes in at once.

    Args:
        capacity (`int`, *optional*):
            A fixed number of columns per slot, for static shapes. By default the cache grows. At least 2, one for a
            prompt and one for a token.
        max_tokens_in_cache (`int`, *optional*):
            The most columns of the target's cache over all slots together, 64 per slot for candidates included;
            requests wait until there is room. The drafter's cache, where it has one, is as long.
        prefill_chunk_size (`int`, *optional*, defaults to 512):
            The most tokens of a prompt that one pass takes in while other rows are being decoded.

    Raises:
        `ValueError` or `TypeError`: if a number is not an int of at least 1, or so small that no request could ever
            be decoded.
    """

    capacity: int | None = None
    max_tokens_in_cache: int | None = None
    prefill_chunk_size: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None or field.name == "prefill_chunk_size":
                object.__setattr__(self, field.name, check_count(field.name, value))
        if self.capacity is not None:
            check_count("capacity", self.capacity, MIN_TOKENS)
        if self.max_tokens_in_cache is not None:
            check_count("max_tokens_in_cache", self.max_tokens_in_cache, MIN_TOKENS + CANDIDATE_COLUMNS)

    @property
    def num_columns(self) -> int | None:
        """Columns of a cache of fixed size, None if it grows."""
        return None if self.capacity is None else self.capacity + CANDIDATE_COLUMNS

    def check_slots(self, num_slots: int) -> None:
        """Raises `ValueError` if a cache of fixed size for so many slots is larger than it may be."""
        most = self.max_tokens_in_cache
        if self.num_columns is not None and most is not None and num_slots * self.num_columns > most:
            raise ValueError(
                f"`max_batch_size` of {num_slots} and `capacity` of {self.capacity} need {num_slots} x "
                f"({self.capacity} + {CANDIDATE_COLUMNS}) columns, but `max_tokens_in_cache` is {most}. Raise it to "
                f"{num_slots * self.num_columns}, or lower the others."
            )

    def check_room(self, request: Request) -> None:
        """Raises `ValueError` if a request would not fit if it were alone."""
        needed = len(request.prompt_ids) + request.max_new_tokens
        if self.capacity is not None and needed > self.capacity:
            raise ValueError(
                f"Prompt and budget come to {needed} tokens, but the cache has a `capacity` of {self.capacity} "
                "columns."
            )
        if self.max_tokens_in_cache is not None and columns_for(request) > self.max_tokens_in_cache:
            raise ValueError(
                f"Prompt, budget and candidates need {columns_for(request)} columns, but `max_tokens_in_cache` is "
                f"{self.max_tokens_in_cache}."
            )

    @property
    def longest_row(self) -> int | None:
        """The most tokens that a prompt and its text can have together, None if nothing bounds them."""
        most = self.max_tokens_in_cache
        limits = [self.capacity, None if most is None else most - CANDIDATE_COLUMNS]
        return min((limit for limit in limits if limit is not None), default=None)


NO_LIMITS = CacheLimits()


def columns_for(request: Request) -> int:
    """The columns that a request may need."""
    return len(request.prompt_ids) + request.max_new_tokens + CANDIDATE_COLUMNS
