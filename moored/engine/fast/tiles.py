"""How the kernels of decoding steps divide their work, and which products are left to the library.

All of it was measured on an H200. A product of few rows is faster in a kernel of its own: the
library cannot fill the GPU with it, the next kernel is launched while it runs, gates are part of
it, and the norm behind it adds up its parts. On Hopper such kernels are those of
`hopper_products` and `hopper_attention`, whose weights and cells are on their way before the kernel
before has ended; elsewhere those of `decode_kernels`, for small matrices. More rows are left to the
library.
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
MANY_ROWS = 2048
"""From here on gated units are one kernel on Hopper."""
LONG = 4096
"""Columns from which on more programs share them."""
FEW_PROGRAMS = 264
"""Two for every multiprocessor: up to here attention is faster with several warps in each."""
BYTES_AT_ONCE = 64 * 256
"""Of keys that attention loads at a time: more of wide heads would not fit into shared memory."""

# Of an H100 or H200.
MULTIPROCESSORS = 132
"""Programs that run at once where each takes most of the shared memory."""
SHARED_BYTES = 226_000
"""Of the shared memory, which is 227 KiB."""
LONG_PARTS, SHORT_PARTS = 6, {16: 2, 32: 2, 64: 4, 128: 3}
"""Programs that share the columns at most: of long lines, and of others by the rows of a tile."""
SPLITS = (8, 4, 2)
"""Programs that may share the cells of a row: few numbers, since each is compiled for itself."""
HEADS = 16
"""Query heads that attention on Hopper takes at once: all of a KV head."""


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
    is_early: bool = False
    """Whether the product is one of `hopper_products`, which take all rows at once."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How attention of one new token per row goes over the cells of a slot."""

    cells: int
    """Cells at a time."""
    warps: int
    stages: int = 3
    splits: int = 1
    """Programs that share the cells of a row."""
    is_early: bool = False
    """Whether it is that of `hopper_attention`."""


def tile_of(
    num_rows: int,
    num_lines: int,
    num_columns: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    most_parts: int = 1,
    copies: bool = False,
) -> Tile | None:
    """The tile of a product; None: it is left to the library.

    `gated`: the lines are those of two matrices. `most_parts`: it may be left in so many. `copies`:
    the device has Hopper's copy engine.
    """
    if dtype != torch.bfloat16 or num_rows > MAX_ROWS:
        return None
    # The copy engine wants lines that begin at multiples of 16 bytes.
    if copies and num_columns % 8 == 0:
        return _early_tile(num_rows, num_lines, num_columns, gated, most_parts)
    size = num_lines * num_columns
    is_small = size <= MAX_GATED_ELEMENTS if gated else size <= MAX_ELEMENTS
    if not is_small or (num_lines > MAX_LINES and not gated):
        return None
    in_parts = most_parts > 1
    if num_rows <= 32:
        return _tile_of_few(num_rows, num_columns, gated, in_parts)
    if gated:
        return Tile(64, 64, 64)
    if in_parts and num_columns >= LONG:
        return Tile(64, 128, 64, parts=8)
    rows = 64 if num_rows <= 64 else 128
    return Tile(rows, 32, 64, parts=4) if in_parts else Tile(rows, 16, 64, stages=5)


def _early_tile(
    num_rows: int, num_lines: int, num_columns: int, gated: bool, most_parts: int
) -> Tile | None:
    rows = next(size for size in (16, 32, 64, 128) if num_rows <= size)
    num_lines = num_lines // 2 if gated else num_lines
    lines, warps = (64, 4) if num_lines <= 64 * MULTIPROCESSORS or not gated else (128, 8)
    programs = -(-num_lines // lines)
    if programs > MULTIPROCESSORS:
        return None
    columns = (256 if rows <= 32 else 128) // (2 if gated else 1)
    blocks = -(-num_columns // columns)
    parts = min(most_parts, blocks, _early_parts(rows, programs, num_columns))
    bytes_each = 2 * columns * (rows + lines * (2 if gated else 1)) + 8
    stages = min(-(-blocks // parts), SHARED_BYTES // bytes_each)
    return Tile(rows, lines, columns, parts, warps, stages, is_early=True)


def _early_parts(rows: int, programs: int, num_columns: int) -> int:
    most = LONG_PARTS if num_columns >= LONG else SHORT_PARTS[rows]
    return max(1, min(most, MULTIPROCESSORS // programs))


def _tile_of_few(num_rows: int, num_columns: int, gated: bool, in_parts: bool) -> Tile:
    rows = 16 if num_rows <= 16 else 32
    if gated:
        return Tile(rows, 32, 128)
    if in_parts and num_columns >= LONG:
        return Tile(rows, 64, 128, parts=8)
    return Tile(rows, 32, 128, parts=4) if in_parts else Tile(rows, 16, 128)


def attention_tile(
    num_programs: int, group: int, head_width: int, element_size: int, *, copies: bool = False
) -> AttentionTile:
    """The tile for so many pairs of a row and a KV head.

    `group`: query heads to a KV head. `element_size` in bytes. `copies`: as above.
    """
    if copies and element_size == 2 and group <= HEADS and head_width in (64, 128):
        splits = next((n for n in SPLITS if n * num_programs <= MULTIPROCESSORS), 1)
        if splits > 1:
            return AttentionTile(cells=128, warps=4, stages=2, splits=splits, is_early=True)
        if num_programs <= (FEW_PROGRAMS if head_width == 64 else MULTIPROCESSORS):
            return AttentionTile(cells=128, warps=4, is_early=True)
        if num_programs <= FEW_PROGRAMS:
            return AttentionTile(cells=32, warps=1, stages=6, is_early=True)
    most = cells_at_once(head_width, element_size)
    if num_programs > FEW_PROGRAMS:
        return AttentionTile(cells=min(32, most), warps=1)
    return AttentionTile(cells=most, warps=2 if head_width <= 64 else 4)


@dataclass(frozen=True, slots=True)
class GatedTile:
    """How gated units of many rows are divided among programs."""

    rows: int = 128
    lines: int = 128
    """Of each of the two matrices."""
    columns: int = 64
    together: int = 32
    """Tiles of rows that share weights."""
    warps: int = 8
    stages: int = 3


def gated_tile(
    num_rows: int, num_lines: int, num_columns: int, dtype: torch.dtype, *, copies: bool
) -> GatedTile | None:
    """The tile of gated units of more rows than `tile_of` takes; None: left to the library.

    `num_lines` of both matrices.
    """
    # The copy engine reads lines of weights, and writes lines of outputs.
    is_aligned = num_columns % 8 == 0 and num_lines // 2 % 8 == 0
    if dtype != torch.bfloat16 or not copies or not is_aligned or num_rows < MANY_ROWS:
        return None
    return GatedTile()


def cells_at_once(head_width: int, element_size: int) -> int:
    """Cells of a slot that attention loads at a time, 64 at most."""
    return min(64, BYTES_AT_ONCE // (head_width * element_size))
