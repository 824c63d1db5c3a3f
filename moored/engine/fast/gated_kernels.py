"""Gated units of many rows on Hopper: both products and the gate in one kernel.

The library would write what both products give, and another kernel read it to write half as much,
which takes a tenth as long as the products. Programs go from tile to tile; tiles of rows that lie
together share weights in the second-level cache.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moored.engine.fast.tiles import GatedTile


@triton.jit
def _gated(
    x,
    gate,
    up,
    out,
    num_rows,
    num_lines,
    num_columns,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    tiles_of_lines = tl.cdiv(num_lines, LINES)
    in_band = TOGETHER * tiles_of_lines
    for tile in tl.range(tl.program_id(0), tiles_of_rows * tiles_of_lines, PROGRAMS):
        band = tile // in_band * TOGETHER
        height = tl.minimum(tiles_of_rows - band, TOGETHER)
        row = (band + tile % in_band % height) * ROWS
        line = tile % in_band // height * LINES
        opened = tl.zeros((ROWS, LINES), tl.float32)
        passing = tl.zeros((ROWS, LINES), tl.float32)
        for at in range(0, num_columns, COLUMNS):
            rows = x.load([row, at])
            opened = tl.dot(rows, gate.load([line, at]).T, opened)
            passing = tl.dot(rows, up.load([line, at]).T, passing)
        gated = opened * tl.sigmoid(opened) * passing
        out.store([row, line], gated.to(out.dtype))


def gated_product(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tile: GatedTile
) -> torch.Tensor:
    """silu(x @ gate^T) * (x @ up^T)."""
    (num_rows, num_columns), num_lines = x.shape, len(gate)
    out = x.new_empty((num_rows, num_lines))
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_lines, tile.lines)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    weights = [TensorDescriptor.from_tensor(w, [tile.lines, tile.columns]) for w in (gate, up)]
    _gated[(min(programs, num_tiles),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]),
        *weights,
        TensorDescriptor.from_tensor(out, [tile.rows, tile.lines]),
        num_rows,
        num_lines,
        num_columns,
        ROWS=tile.rows,
        LINES=tile.lines,
        COLUMNS=tile.columns,
        TOGETHER=tile.together,
        PROGRAMS=programs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
