"""Products of few rows on Hopper, whose weights are on their way before the inputs are there.

Reading the weights bounds them, and a step is a chain of kernels that wait for one another. So a
program asks the tensor copy engine for its first blocks of weights while the kernel before still
runs, and for the rows once that has ended. R rows, N lines, K columns of the weights. The matrix
units take 64 lines and any number of rows, so the sums are (lines, rows); they are in float32.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moored.engine.fast.tiles import Tile

# Triton 3.8 has another name for it.
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _copy_weights(weight, first, N, at, ready, ws, us, inside, GATED: gl.constexpr):
    copy_block(weight, [first, at], ready, ws, pred=inside)
    if GATED:
        copy_block(weight, [N + first, at], ready, us, pred=inside)


@gluon.jit
def _multiply(w, u, x, acc, up, GATED: gl.constexpr):
    """Begin to multiply a block; when it returns, the block before is done with."""
    acc = warpgroup_mma(w, x, acc, is_async=True)
    if GATED:
        up = warpgroup_mma(u, x, up, is_async=True)
        acc, up = warpgroup_mma_wait(num_outstanding=2, deps=[acc, up])
    else:
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
    return acc, up


@gluon.jit
def _store(out, acc, bias, first, part, R, N, HAS_BIAS: gl.constexpr, num_warps: gl.constexpr):
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    # Threads beside one another have lines beside one another.
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, num_warps], [0, 1])
    acc = gl.convert_layout(acc, flat)
    n = first + gl.arange(0, BN, layout=gl.SliceLayout(1, flat))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, flat))
    if HAS_BIAS:
        share = gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
        acc += gl.where(part == 0, share, 0.0)[:, None]
    at = (part * R + m).to(gl.int64)[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (m < R)[None, :]
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


# One kernel serves all numbers of rows up to a tile's.
@gluon.jit(do_not_specialize=["R"])
def _product(
    x,
    weight,
    bias,
    out,
    R,
    N,
    K,
    columns_each,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    first, part = gl.program_id(0) * BN, gl.program_id(1)
    start = part * columns_each
    count = gl.cdiv(gl.minimum(K - start, columns_each), BK)
    ws = gl.allocate_shared_memory(weight.dtype, [STAGES, BN, BK], weight.layout)
    us = ws
    if GATED:
        us = gl.allocate_shared_memory(weight.dtype, [STAGES, BN, BK], weight.layout)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    BYTES: gl.constexpr = ((2 if GATED else 1) * BN + BM) * BK * 2
    for s in gl.static_range(STAGES):
        mbarrier.expect(ready.index(s), BYTES, pred=s < count)
        at = start + s * BK
        _copy_weights(
            weight, first, N, at, ready.index(s), ws.index(s), us.index(s), s < count, GATED
        )
    gdc_wait()
    gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        copy_block(x, [0, start + s * BK], ready.index(s), xs.index(s), pred=s < count)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BM, 16]
    )
    acc = gl.zeros([BN, BM], gl.float32, layout=mma)
    up = gl.zeros([BN, BM], gl.float32, layout=mma)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        rows = xs.index(stage).permute((1, 0))
        acc, up = _multiply(ws.index(stage), us.index(stage), rows, acc, up, GATED)
        free = (i + STAGES - 1) % STAGES
        inside = (i > 0) & (i + STAGES - 1 < count)
        at = start + (i + STAGES - 1) * BK
        mbarrier.expect(ready.index(free), BYTES, pred=inside)
        _copy_weights(
            weight, first, N, at, ready.index(free), ws.index(free), us.index(free), inside, GATED
        )
        copy_block(x, [0, at], ready.index(free), xs.index(free), pred=inside)
    acc, up = warpgroup_mma_wait(num_outstanding=0, deps=[acc, up])
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    _store(out, acc, bias, first, part, R, N, HAS_BIAS, num_warps)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """x @ weight^T into `out`, (parts, R, lines) where the tile has several; the bias is in one.

    With `gated` the weights are two matrices: silu(x @ first^T) * (x @ second^T).
    """
    num_rows, num_columns = x.shape
    num_lines = len(weight) // 2 if gated else len(weight)
    each = triton.cdiv(triton.cdiv(num_columns, tile.columns), tile.parts) * tile.columns
    _product[(triton.cdiv(num_lines, tile.lines), tile.parts)](
        described(x, tile.rows, tile.columns),
        described(weight, tile.lines, tile.columns),
        x if bias is None else bias,
        out,
        num_rows,
        num_lines,
        num_columns,
        each,
        HAS_BIAS=bias is not None,
        GATED=gated,
        BM=tile.rows,
        BN=tile.lines,
        BK=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        launch_pdl=True,
    )
    return out


def described(matrix: torch.Tensor, lines: int, columns: int) -> TensorDescriptor:
    """What the copy engine has to know of a matrix that it brings in such blocks."""
    block = [lines, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, block, layout)
