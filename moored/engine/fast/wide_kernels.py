"""Products of few rows with large matrices, through the tensor copy engine of Hopper.

Reading the weights bounds them. The copy engine brings blocks of both factors into shared memory
while few threads multiply, and a program takes as many lines as make all programs run at once. R
rows, N lines, K columns of the weights. Sums are in float32.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moored.engine.fast.decode_kernels import overlap_options, wait_for_inputs
from moored.engine.fast.tiles import Tile

MIN_ROWS = 64
"""Rows that the matrix units take at least."""


@triton.jit
def _store(out, acc, first, part, R, N, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.arange(0, BM), first + tl.arange(0, BN)
    at = (part * R + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(out + at, acc, mask=(m < R)[:, None] & (n < N)[None, :])


@triton.jit
def _gate(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _wide(
    x,
    weight,
    more_weight,
    out,
    R,
    N,
    K,
    columns_each,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MORE: tl.constexpr,
    BK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first = tl.program_id(0) * (BN + MORE)
    part = tl.program_id(1)
    start = part * columns_each
    stop = tl.minimum(K, start + columns_each)
    if OVERLAPS:
        wait_for_inputs()
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    if MORE > 0:
        more = tl.zeros([BM, MORE], tl.float32)
        more_up = tl.zeros([BM, MORE], tl.float32)
    for k in range(start, stop, BK):
        a = x.load([0, k])
        acc = tl.dot(a, weight.load([first, k]).T, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(a, weight.load([N + first, k]).T, up, input_precision="ieee")
        if MORE > 0:
            w = more_weight.load([first + BN, k])
            more = tl.dot(a, w.T, more, input_precision="ieee")
            if GATED:
                w = more_weight.load([N + first + BN, k])
                more_up = tl.dot(a, w.T, more_up, input_precision="ieee")
    if GATED:
        acc = _gate(acc, up)
    _store(out, acc, first, part, R, N, BM, BN)
    if MORE > 0:
        if GATED:
            more = _gate(more, more_up)
        _store(out, more, first + BN, part, R, N, BM, MORE)


def wide_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, *, gated: bool = False
) -> torch.Tensor:
    """x @ weight^T into `out`, (parts, R, lines) where the tile has several.

    With `gated` the weights are two matrices: silu(x @ first^T) * (x @ second^T).
    """
    num_rows, num_columns = x.shape
    num_lines = len(weight) // 2 if gated else len(weight)
    rows = max(MIN_ROWS, triton.next_power_of_2(num_rows))
    each = triton.cdiv(triton.cdiv(num_columns, tile.columns), tile.parts) * tile.columns
    more = TensorDescriptor.from_tensor(weight, [tile.more_lines or tile.lines, tile.columns])
    _wide[(triton.cdiv(num_lines, tile.lines + tile.more_lines), tile.parts)](
        TensorDescriptor.from_tensor(x, [rows, tile.columns]),
        TensorDescriptor.from_tensor(weight, [tile.lines, tile.columns]),
        more,
        out,
        num_rows,
        num_lines,
        num_columns,
        each,
        GATED=gated,
        BM=rows,
        BN=tile.lines,
        MORE=tile.more_lines,
        BK=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap_options(x.device),
    )
    return out
