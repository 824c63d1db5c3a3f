"""How the kernels of decoding steps divide their work, and which products are left to the library.

All of it was measured on an H200. A product of few rows with a matrix of few lines is faster in a
kernel of its own: the library cannot fill the GPU with it, the next kernel is launched while it
runs, and the norm behind it adds up its parts. Larger products are left to the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_ROWS = 128
MAX_LINES = 1280
MAX_ELEMENTS = 5_000_000
"""Of a matrix with a kernel of its own: its lines, and its elements."""
MAX_GATED_ELEMENTS = 2_000_000
"""Elements of both matrices of a gated product with a kernel of its own."""
LONG = 4096
"""Columns from which on more programs share them."""
FEW_PROGRAMS = 264
"""Two for every multiprocessor: up to here attention is faster with several warps in each."""
BYTES_AT_ONCE = 64 * 256
"""Of keys that attention loads at a time: more of wide heads would not fit into shared memory."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is divided among programs."""

    rows: int
    lines: int
    """Lines of the weights."""
    columns: int
    """Columns that are multiplied at a time."""
    parts: int = 1
    """Programs that share the columns; their sums are added later."""
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How attention of one new token per row goes over the cells of a slot."""

    cells: int
    """Cells at a time."""
    warps: int
    stages: int = 3


def tile_of(
    num_rows: int,
    num_lines: int,
    num_columns: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    in_parts: bool = False,
) -> Tile | None:
    """The tile of a product, or None where the library's is faster.

    `gated`: the lines are those of two matrices. `in_parts`: it may be left in parts.
    """
    size = num_lines * num_columns
    is_small = size <= MAX_GATED_ELEMENTS if gated else size <= MAX_ELEMENTS
    is_narrow = gated or num_lines <= MAX_LINES
    if dtype != torch.bfloat16 or num_rows > MAX_ROWS or not (is_small and is_narrow):
        return None
    if num_rows <= 32:
        return _tile_of_few(num_rows, num_columns, gated, in_parts)
    if gated:
        return Tile(64, 64, 64)
    if in_parts and num_columns >= LONG:
        return Tile(64, 128, 64, parts=8)
    rows = 64 if num_rows <= 64 else 128
    return Tile(rows, 32, 64, parts=4) if in_parts else Tile(rows, 16, 64, stages=5)


def _tile_of_few(num_rows: int, num_columns: int, gated: bool, in_parts: bool) -> Tile:
    rows = 16 if num_rows <= 16 else 32
    if gated:
        return Tile(rows, 32, 128)
    if in_parts and num_columns >= LONG:
        return Tile(rows, 64, 128, parts=8)
    return Tile(rows, 32, 128, parts=4) if in_parts else Tile(rows, 16, 128)


def attention_tile(num_programs: int, head_width: int, element_size: int) -> AttentionTile:
    """The tile for so many pairs of a row and a KV head; `element_size` in bytes."""
    most = cells_at_once(head_width, element_size)
    if num_programs > FEW_PROGRAMS:
        return AttentionTile(cells=min(32, most), warps=1)
    return AttentionTile(cells=most, warps=2 if head_width <= 64 else 4)


def cells_at_once(head_width: int, element_size: int) -> int:
    """Cells of a slot that attention loads at a time, 64 at most."""
    return min(64, BYTES_AT_ONCE // (head_width * element_size))
