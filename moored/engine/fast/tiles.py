"""How the kernels of decoding steps divide their work, and which products are left to the library.

All of it was measured on an H200. A product of few rows is faster in a kernel of its own: the
library cannot fill the GPU with it, the next kernel is launched while it runs, gates are part of
it, and the norm behind it adds up its parts. Large matrices need the copy engine of Hopper
(`wide_kernels`) and as many programs as run at once; where that does not come out even, and for
more rows, products are left to the library.
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
MULTIPROCESSORS = 132
"""Of an H100 or H200: programs of `wide_kernels` that run at once."""
WIDE_LINES = (64, 80, 96)
"""Lines of both matrices that a program of a wide gated product may have."""
MIN_WIDE_COLUMNS = 384
"""Fewest columns of a part of a wide product."""
MIN_WIDE_GATED_ROWS = 9
"""Below, wide gated products gain nothing."""
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
    is_wide: bool = False
    """Whether the product is one of `wide_kernels`, which take all rows at once."""
    more_lines: int = 0
    """Lines of a second block, where a program has a number of them that is no power of 2."""


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
    copies: bool = False,
) -> Tile | None:
    """The tile of a product; None: it is left to the library.

    `gated`: the lines are those of two matrices. `in_parts`: it may be left in parts. `copies`: the
    device has Hopper's copy engine.
    """
    size = num_lines * num_columns
    is_small = size <= MAX_GATED_ELEMENTS if gated else size <= MAX_ELEMENTS
    is_narrow = gated or num_lines <= MAX_LINES
    if dtype != torch.bfloat16 or num_rows > MAX_ROWS:
        return None
    is_own = is_small and is_narrow
    # The copy engine wants lines that begin at multiples of 16 bytes.
    if copies and num_columns % 8 == 0 and not (is_own and (num_rows <= 32 or num_columns < LONG)):
        rows = 64 if num_rows <= 64 else 128
        if gated:
            is_worth_it = num_rows >= MIN_WIDE_GATED_ROWS
            return _wide_gated(rows, num_lines // 2) if is_worth_it else None
        if in_parts:
            return _wide_in_parts(rows, num_lines, num_columns)
    if not is_own:
        return None
    if num_rows <= 32:
        return _tile_of_few(num_rows, num_columns, gated, in_parts)
    if gated:
        return Tile(64, 64, 64)
    if in_parts and num_columns >= LONG:
        return Tile(64, 128, 64, parts=8)
    rows = 64 if num_rows <= 64 else 128
    return Tile(rows, 32, 64, parts=4) if in_parts else Tile(rows, 16, 64, stages=5)


def _wide_gated(rows: int, num_lines: int) -> Tile | None:
    for lines in WIDE_LINES:
        if num_lines > MULTIPROCESSORS * lines:
            continue
        more = lines - 64
        columns, stages = (64, 5) if rows > 64 else (128, 3) if more else (64, 4)
        return Tile(rows, 64, columns, stages=stages, is_wide=True, more_lines=more)
    return None


def _wide_in_parts(rows: int, num_lines: int, num_columns: int) -> Tile | None:
    programs = -(-num_lines // 64)
    for parts in (8, 4, 2):
        if programs * parts <= MULTIPROCESSORS and num_columns >= parts * MIN_WIDE_COLUMNS:
            columns, stages = (128, 4) if rows == 64 else (64, 6)
            return Tile(rows, 64, columns, parts=parts, stages=stages, is_wide=True)
    return None


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
