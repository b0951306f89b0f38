"""SlotCache: keys and values of several rows, each written at that row's own next columns.

Rows are packed from column 0 on, so a position id is a column number. Rolling back is lowering one integer per row;
nothing cached ever moves. Knows no model class: layer kinds come from the config.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs

GROWTH_CHUNK = 128  # columns
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "dummy"}


def unserved_layers(config: PreTrainedConfig) -> str | None:
    """What a [`SlotCache`] cannot hold of a model's layers, None if it holds them all."""
    kinds, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if unknown := set(kinds) - SERVED_LAYER_TYPES:
        return f"layers of kind {sorted(unknown)}"
    windows = _windows(kinds, settings)
    return f"sliding windows of {len(windows)} sizes, {sorted(windows)}" if len(windows) > 1 else None


def _windows(kinds: list[str], settings: list[dict[str, Any]]) -> set[int]:
    windows = (setting.get("sliding_window") for kind, setting in zip(kinds, settings) if kind != "dummy")
    return {window for window in windows if window is not None}


@dataclass(frozen=True)
class SlotWrite:
    """Where the next forward pass reads and writes: rows `first_row` to `first_row + num_rows`, at `columns`."""

    first_row: int
    num_rows: int
    columns: Tensor  # (num_rows, new) where the new keys and values go
    position_ids: Tensor  # (num_rows, new) the same, but right padding repeats the row's last valid position
    width: int  # columns that attention sees
    common_start: int | None  # the first column when it is the same in every row


class SlotLayer(CacheLayerMixin):
    """One layer's buffers of shape `(rows, heads, columns, head_dim)`; `cache.write` says where to write."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: "SlotCache"):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, columns = self.cache.num_allocated_rows, self.cache.num_columns
        self.keys = _new_buffer(key_states, rows, columns)
        self.values = _new_buffer(value_states, rows, columns)
        self.is_initialized = True

    def grow(self) -> None:
        """Makes room for the rows and columns that the cache has allotted."""
        rows, columns = self.cache.num_allocated_rows, self.cache.num_columns
        if self.keys.shape[0] < rows or self.keys.shape[2] < columns:
            self.keys = _grown(self.keys, rows, columns)
            self.values = _grown(self.values, rows, columns)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.grow()
        write = self.cache.write
        return _store(self.keys, key_states, write), _store(self.values, value_states, write)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.write.width, 0

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1 if self.cache.capacity is None else self.cache.capacity


def _new_buffer(states: Tensor, rows: int, columns: int) -> Tensor:
    # Zeros, since masked columns are still multiplied (by a weight of 0) and must not be NaN.
    return states.new_zeros(rows, states.shape[1], columns, states.shape[3])


def _grown(buffer: Tensor, rows: int, columns: int) -> Tensor:
    grown = _new_buffer(buffer, rows, columns)
    grown[: buffer.shape[0], :, : buffer.shape[2]] = buffer
    return grown


def _store(buffer: Tensor, states: Tensor, write: SlotWrite) -> Tensor:
    rows = buffer[write.first_row : write.first_row + write.num_rows]
    if write.common_start is not None:
        rows[:, :, write.common_start : write.common_start + states.shape[2]] = states
    else:
        row_index = torch.arange(write.num_rows, device=buffer.device)[:, None]
        rows[row_index, :, write.columns.to(buffer.device)] = states.transpose(1, 2)
    return rows[:, :, : write.width]


class SlotCache(Cache):
    """
    A [`~transformers.Cache`] in which every row has its own length.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration; its layers must be of full or sliding attention.
        num_rows (`int`):
            How many rows (slots) there are.
        capacity (`int`, *optional*):
            A fixed number of columns, for static shapes. By default the buffers grow in chunks of
            128 columns and as rows are used; growing is the one time at which they are reallocated.
        max_tokens (`int`, *optional*):
            The most columns that growing may allot to all rows together.

    Attributes:
        lengths (`torch.LongTensor` of shape `(rows,)`, on the CPU):
            How many columns of each row count.
        sliding_window (`int`, *optional*):
            How far sliding layers see, their own column included.
        spares_prompts (`bool`):
            Whether the window cuts only what is generated: each row's first `prompt_lengths` columns see all columns
            before them. See `check_window`.

    Raises:
        `ValueError`: if a layer keeps something other than keys and values of all past tokens.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        num_rows: int,
        capacity: int | None = None,
        max_tokens: int | None = None,
    ):
        text_config = config.get_text_config(decoder=True)
        kinds, settings = get_layer_types_and_kwargs(text_config)
        if layers := unserved_layers(config):
            raise ValueError(
                f"`SlotCache` holds layers of full attention and of one sliding window, but the model has {layers}."
            )
        self.num_rows = num_rows
        self.capacity = capacity
        self.max_tokens = max_tokens
        self.num_columns = capacity or 0
        self.num_allocated_rows = 0 if capacity is None else num_rows
        self.lengths = torch.zeros(num_rows, dtype=torch.long)
        nothing = torch.zeros(0, 0, dtype=torch.long)
        self.write = SlotWrite(0, 0, nothing, nothing, width=0, common_start=None)
        self.sliding_window = next(iter(_windows(kinds, settings)), None)
        self.spares_prompts = False
        self.prompt_lengths = [0] * num_rows
        # Layers that read another layer's keys and values ("dummy") need a mask of their own kind all the same.
        self._mask_kinds = sorted(set(getattr(text_config, "layer_types", None) or kinds) - {"dummy", "moe", "mlp"})
        super().__init__(layers=[DummyLayer() if kind == "dummy" else SlotLayer(self) for kind in kinds])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        start = self.write.common_start
        return int(self.lengths.max()) if start is None else start

    def begin(self, rows: slice, num_tokens: Tensor, num_new: int, device: torch.device) -> SlotWrite:
        """
        Prepares a forward pass of `num_new` token columns for the rows `rows`.

        Args:
            rows (`slice`):
                Consecutive rows, with explicit start and stop.
            num_tokens (`torch.LongTensor` of shape `(rows,)`, on the CPU):
                How many of the token columns count in each row; the rest is right padding.
            num_new (`int`):
                The number of token columns.
            device (`torch.device`):
                Where the model takes its inputs.
        """
        starts, counts = self.lengths[rows].tolist(), num_tokens.tolist()
        width = max(starts) + num_new
        if self.capacity is not None and width > self.capacity:
            raise ValueError(f"The cache has a `capacity` of {self.capacity} columns, but {width} are needed.")
        self.num_allocated_rows = max(self.num_allocated_rows, rows.stop)
        if width > self.num_columns:
            wanted = -(-max(width, self.num_columns * 3 // 2) // GROWTH_CHUNK) * GROWTH_CHUNK
            if self.max_tokens is not None:
                wanted = max(width, min(wanted, self.max_tokens // self.num_allocated_rows))
            self.num_columns = wanted
        columns = torch.tensor([range(start, start + num_new) for start in starts]).to(device, non_blocking=True)
        position_ids = columns
        if min(counts) < num_new:
            last = [start + max(count - 1, 0) for start, count in zip(starts, counts)]
            position_ids = columns.clamp(max=torch.tensor(last).to(device, non_blocking=True)[:, None])
        self.write = SlotWrite(
            first_row=rows.start,
            num_rows=rows.stop - rows.start,
            columns=columns,
            position_ids=position_ids,
            width=width if self.capacity is None else self.capacity,
            common_start=starts[0] if min(starts) == max(starts) else None,
        )
        return self.write

    def attention_mask(self, is_additive: bool, dtype: torch.dtype) -> Tensor | dict[str, Tensor] | None:
        """
        The 4-D mask of the pass prepared by `begin`: a query sees the columns up to its own, in sliding layers only
        the last `sliding_window` of them. One tensor of shape `(rows, 1, new, columns)`, or one per layer kind; None
        where the model's own causal attention is the same, and faster.

        Args:
            is_additive (`bool`):
                Floats to be added to the scores instead of booleans: eager attention knows nothing else.
            dtype (`torch.dtype`):
                The type of an additive mask.
        """
        if self._is_plainly_causal():
            return None
        positions = self.write.columns[:, None, :, None]
        columns = torch.arange(self.write.width, device=positions.device)
        is_past = columns <= positions
        masks = {"full_attention": is_past}
        if self.sliding_window is not None:
            is_near = columns > positions - self.sliding_window
            if self.spares_prompts:
                ends = self.prompt_lengths[self.write.first_row : self.write.first_row + self.write.num_rows]
                is_near |= positions < torch.tensor(ends, device=positions.device)[:, None, None, None]
            masks["sliding_attention"] = is_past & is_near
        if is_additive:
            allowed = torch.zeros((), dtype=dtype, device=positions.device)
            floor = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
            masks = {kind: torch.where(mask, allowed, floor) for kind, mask in masks.items()}
        if len(self._mask_kinds) == 1:
            return masks[self._mask_kinds[0]]
        return {kind: masks[kind] for kind in self._mask_kinds}

    def _is_plainly_causal(self) -> bool:
        """All rows stand at one column, and either one token sees everything or nothing came before."""
        start, new = self.write.common_start, self.write.columns.shape[1]
        return start is not None and (new == 1 or start == 0) and self.capacity is None and self.sliding_window is None

    def advance(self, rows: slice, num_tokens: Tensor) -> None:
        """Counts the tokens that the pass prepared by `begin` has written."""
        self.lengths[rows] += num_tokens

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Gives row `destination` the first `length` columns of row `source`."""
        assert length <= int(self.lengths[source]), "only what counts can be copied"
        self.num_allocated_rows = max(self.num_allocated_rows, destination + 1)
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and length > 0:
                layer.grow()
                for buffer in (layer.keys, layer.values):
                    buffer[destination, :, :length] = buffer[source, :, :length]
        self.lengths[destination] = length

    def release(self) -> None:
        """Gives the memory of an empty cache back."""
        assert not self.lengths.any(), "a row is still in use"
        if self.capacity is None:
            self.num_columns = self.num_allocated_rows = 0
            for layer in self.layers:
                if isinstance(layer, SlotLayer) and layer.is_initialized:
                    layer.keys = layer.values = torch.empty(0)
                    layer.is_initialized = False

    def truncate(self, row: int, length: int) -> None:
        """Rolls row `row` back to at most `length` columns."""
        self.lengths[row] = min(int(self.lengths[row]), length)
