"""Keys and values of a batch of sequences of unequal length, one row per sequence.

`RowCache` stands in for a Hugging Face cache: attention layers call `update` with the keys and
values of the new tokens, which are written at each row's own positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowCache:
    """Preallocated (R, heads, capacity, head width) keys and values, layer by layer."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._positions: torch.Tensor | None = None
        self._visible = 0

    def place(self, positions: torch.Tensor, visible: int) -> None:
        """Say where the next (R, T) tokens go, and how many columns they look at."""
        self._positions = positions
        self._visible = visible

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new keys and values (R, heads, T, width); return all visible ones."""
        assert self._positions is not None, "call place before the forward pass"
        if layer_idx == len(self.keys):
            shape = (self.num_rows, keys.shape[1], self.capacity, keys.shape[3])
            self.keys.append(keys.new_zeros(shape))
            self.values.append(values.new_zeros(shape))
        rows = torch.arange(self.num_rows, device=keys.device)[:, None]
        self.keys[layer_idx][rows, :, self._positions] = keys.transpose(1, 2)
        self.values[layer_idx][rows, :, self._positions] = values.transpose(1, 2)
        visible = self._visible
        return self.keys[layer_idx][:, :, :visible], self.values[layer_idx][:, :, :visible]

    def select(self, rows: torch.Tensor, capacity: int) -> RowCache:
        """A new cache of some rows (repeats allowed), with another capacity."""
        return gather([(self, rows)], capacity)


def gather(parts: Sequence[tuple[RowCache, torch.Tensor]], capacity: int) -> RowCache:
    """One cache from rows of several, in order."""
    result = RowCache(sum(len(rows) for _, rows in parts), capacity)
    for layer in range(len(parts[0][0].keys)):
        result.keys.append(_gather_layer([(c.keys[layer], rows) for c, rows in parts], capacity))
        result.values.append(
            _gather_layer([(c.values[layer], rows) for c, rows in parts], capacity)
        )
    return result


def _gather_layer(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], capacity: int
) -> torch.Tensor:
    first, _ = parts[0]
    num_rows = sum(len(rows) for _, rows in parts)
    result = first.new_zeros((num_rows, first.shape[1], capacity, first.shape[3]))
    start = 0
    for tensor, rows in parts:
        columns = min(tensor.shape[2], capacity)
        result[start : start + len(rows), :, :columns] = tensor[rows, :, :columns]
        start += len(rows)
    return result
