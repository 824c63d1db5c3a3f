"""Attention of decoding steps on Hopper: keys and values are on their way before the queries are.

As in `hopper_products`, the copy engine brings the first cells while the product that makes the
queries still runs. Where rows are few, several programs share the cells of one, and the last to end
adds up what all have found. R rows, D head width, G query heads to a KV head.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moored.engine.fast.hopper_products import copy_block, described
from moored.engine.fast.rows import Rows
from moored.engine.fast.tiles import HEADS, AttentionTile

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
# Triton 3.7 has another name for it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _summed(at, stride, PARTS: gl.constexpr):
    """What lies at `at`, summed over its parts, in float32."""
    found = gl.load(at).to(gl.float32)
    for part in gl.static_range(1, PARTS):
        found += gl.load(at + part * stride).to(gl.float32)
    return found


@gluon.jit
def _turned(
    source,
    stride,
    gain,
    cos,
    sin,
    position,
    eps,
    d,
    D: gl.constexpr,
    PARTS: gl.constexpr,
    HAS_NORM: gl.constexpr,
):
    """Heads at `source` (M,) normed and turned by their position: (M, D) in float32."""
    HALF: gl.constexpr = D // 2
    partner = d ^ HALF
    own = _summed(source[:, None] + d[None, :], stride, PARTS)
    other = _summed(source[:, None] + partner[None, :], stride, PARTS)
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(own * own, axis=1) / D + eps)[:, None]
        own = own * scale * gl.load(gain + d)[None, :]
        other = other * scale * gl.load(gain + partner)[None, :]
    angle = position * HALF + d % HALF
    s = gl.load(sin + angle)
    return own * gl.load(cos + angle)[None, :] + other * gl.where(d < HALF, -s, s)[None, :]


@gluon.jit
def _copy_cells(
    keys, values, ks, vs, ready, number, cell, inside, N: gl.constexpr, STAGES: gl.constexpr
):
    """Ask for the `number`-th tile of a program, whose first cell is given."""
    stage = number % STAGES
    D: gl.constexpr = keys.block_shape[1]
    mbarrier.expect(ready.index(stage), 2 * N * D * 2, pred=inside)
    copy_block(keys, [cell, 0], ready.index(stage), ks.index(stage), pred=inside)
    copy_block(values, [cell, 0], ready.index(stage), vs.index(stage), pred=inside)


@gluon.jit
def _take_in(q, k, v, length, scale, best, total, acc, N: gl.constexpr, mma: gl.constexpr):
    """Take a tile into a running softmax; cells from `length` on are not part of it."""
    zeros = gl.zeros([q.shape[0], N], gl.float32, layout=mma)
    keys = k.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
    scores = mma_v2(q, keys, zeros) * scale
    column = gl.arange(0, N, layout=gl.SliceLayout(0, mma))
    scores = gl.where((column < length)[None, :], scores, -1e30)
    peak = gl.maximum(best, gl.max(scores, axis=1))
    shrink = gl.exp2(best - peak)
    weight = gl.exp2(scores - peak[:, None])
    total = total * shrink + gl.sum(weight, axis=1)
    values = v.load(gl.DotOperandLayout(1, mma, 2))
    weight = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(0, mma, 2))
    return peak, total, mma_v2(weight, values, acc * shrink[:, None])


@gluon.jit
def _share(
    partials, done, pair, split, best, total, acc, m, n, G: gl.constexpr, SPLITS: gl.constexpr
):
    """Leave what a program has found to others; the last one gets the sum of all."""
    D: gl.constexpr = acc.shape[1]
    EACH: gl.constexpr = G * (D + 2)
    is_real = m < G
    cells = m[:, None] * D + n[None, :]
    mine = partials + (pair * SPLITS + split) * EACH
    gl.store(mine + cells, acc, mask=is_real[:, None])
    gl.store(mine + G * D + m, best, mask=is_real)
    gl.store(mine + G * D + G + m, total, mask=is_real)
    barrier()
    is_last = gl.atomic_add(done + pair, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if is_last:
        gl.store(done + pair, 0)
        best = gl.full_like(best, -1e30)
        total = gl.zeros_like(total)
        acc = gl.zeros_like(acc)
        for i in gl.static_range(SPLITS):
            at = partials + (pair * SPLITS + i) * EACH
            a = gl.load(at + cells, mask=is_real[:, None], other=0.0, cache_modifier=".cg")
            b = gl.load(at + G * D + m, mask=is_real, other=-1e30, cache_modifier=".cg")
            t = gl.load(at + G * D + G + m, mask=is_real, other=0.0, cache_modifier=".cg")
            peak = gl.maximum(best, b)
            shrink, grow = gl.exp2(best - peak), gl.exp2(b - peak)
            total = total * shrink + t * grow
            acc = acc * shrink[:, None] + a * grow[:, None]
            best = peak
    return is_last, total, acc


@gluon.jit
def _attend_one(
    qkv,
    keys,
    values,
    key_cells,
    value_cells,
    cos,
    sin,
    q_norm,
    k_norm,
    out,
    partials,
    done,
    slots,
    starts,
    befores,
    prefix_slots,
    prefix_lengths,
    stride,
    eps,
    scale,
    capacity,
    H: gl.constexpr,
    KV: gl.constexpr,
    D: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    num_warps: gl.constexpr,
):
    G: gl.constexpr = H // KV
    row, kv_head, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    token = gl.load(starts + row)
    before = gl.load(befores + row)
    prefix_length = gl.load(prefix_lengths + row)
    own_cell = (gl.load(slots + row) * KV + kv_head) * capacity
    prefix_cell = (gl.load(prefix_slots + row) * KV + kv_head) * capacity
    # Tiles of the prefix, then those of the row's own slot.
    prefix_tiles = gl.cdiv(prefix_length, N)
    num_tiles = prefix_tiles + gl.cdiv(before, N)
    each = gl.cdiv(num_tiles, SPLITS)
    first = split * each
    last = gl.minimum(num_tiles, first + each)
    ks = gl.allocate_shared_memory(keys.dtype, [STAGES, N, D], keys.layout)
    vs = gl.allocate_shared_memory(keys.dtype, [STAGES, N, D], keys.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        tile = first + s
        own = own_cell - prefix_tiles * N
        cell = gl.where(tile < prefix_tiles, prefix_cell, own) + tile * N
        _copy_cells(keys, values, ks, vs, ready, s, cell, tile < last, N, STAGES)
    gdc_wait()
    gdc_launch_dependents()

    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, num_warps], instr_shape=[16, 8]
    )
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, flat))
    member = gl.arange(0, M, layout=gl.SliceLayout(1, flat))
    one = gl.zeros([1], gl.int32, layout=gl.SliceLayout(1, flat))
    line = qkv + token.to(gl.int64) * (H + 2 * KV) * D
    position = prefix_length + before
    dtype: gl.constexpr = keys.dtype
    # Members beyond the group repeat its last one.
    source = line + (kv_head * G + gl.minimum(member, G - 1)) * D
    q = _turned(source, stride, q_norm, cos, sin, position, eps, d, D, PARTS, HAS_NORM).to(dtype)
    source = line + (H + kv_head) * D + one
    k = _turned(source, stride, k_norm, cos, sin, position, eps, d, D, PARTS, HAS_NORM).to(dtype)
    v = _summed(line + (H + KV + kv_head) * D + d, stride, PARTS).to(dtype)
    # Powers of 2 are the faster ones.
    scale = scale * LOG2_E
    # The new token is the first of the first program, and is not read back from the cache.
    is_first = split == 0
    best = gl.sum(q.to(gl.float32) * k.to(gl.float32), axis=1) * scale
    best = gl.convert_layout(gl.where(is_first, best, -1e30), gl.SliceLayout(1, mma))
    total = gl.zeros_like(best) + gl.where(is_first, 1.0, 0.0)
    new = gl.convert_layout(v.to(gl.float32), gl.SliceLayout(0, mma))
    acc = total[:, None] * new[None, :]
    if is_first:
        at = (own_cell + before).to(gl.int64) * D
        gl.store(key_cells + at + d[None, :] + one[:, None], k)
        gl.store(value_cells + at + d, v)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, mma, 2))
    for tile in range(first, last):
        turn = tile - first
        stage = turn % STAGES
        in_prefix = tile < prefix_tiles
        length = gl.where(in_prefix, prefix_length, before + prefix_tiles * N) - tile * N
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        best, total, acc = _take_in(
            q, ks.index(stage), vs.index(stage), length, scale, best, total, acc, N, mma
        )
        ahead = tile + STAGES
        own = own_cell - prefix_tiles * N
        cell = gl.where(ahead < prefix_tiles, prefix_cell, own) + ahead * N
        _copy_cells(keys, values, ks, vs, ready, turn + STAGES, cell, ahead < last, N, STAGES)

    m = gl.arange(0, M, layout=gl.SliceLayout(1, mma))
    n = gl.arange(0, D, layout=gl.SliceLayout(0, mma))
    is_last = True
    if SPLITS > 1:
        pair = row * KV + kv_head
        is_last, total, acc = _share(partials, done, pair, split, best, total, acc, m, n, G, SPLITS)
    o_at = (token * H + kv_head * G + m)[:, None] * D + n[None, :]
    gl.store(out + o_at, (acc / total[:, None]).to(dtype), mask=(m < G)[:, None] & is_last)


def attend_one(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    rows: Rows,
    num_heads: int,
    eps: float,
    scale: float,
    tile: AttentionTile,
) -> torch.Tensor:
    """One new token per row: its keys and values go to the cache, its attention to `out`.

    Queries, keys and values of the new tokens may be in parts.
    """
    _, kv_heads, capacity, width = keys.shape
    num_rows, parts = len(rows.slots), qkv.shape[0] if qkv.dim() == 3 else 1
    if rows.plan is None:
        rows.plan = _shared_results(num_rows * kv_heads, num_heads // kv_heads, width, tile, out)
    q_norm, k_norm = norms or tables
    _attend_one[(num_rows, kv_heads, tile.splits)](
        qkv,
        described(keys.view(-1, width), tile.cells, width),
        described(values.view(-1, width), tile.cells, width),
        keys,
        values,
        *tables,
        q_norm,
        k_norm,
        out,
        *rows.plan,
        rows.slots,
        rows.starts,
        rows.befores,
        rows.prefix_slots,
        rows.prefix_lengths,
        qkv.stride(0) if parts > 1 else 0,
        eps,
        scale,
        capacity,
        H=num_heads,
        KV=kv_heads,
        D=width,
        M=HEADS,
        N=tile.cells,
        PARTS=parts,
        SPLITS=tile.splits,
        STAGES=tile.stages,
        HAS_NORM=norms is not None,
        num_warps=tile.warps,
        launch_pdl=True,
    )
    return out


def _shared_results(
    num_pairs: int, group: int, width: int, tile: AttentionTile, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what programs that share a row find, and how many are done: for all layers."""
    if tile.splits == 1:
        return out, out
    size = num_pairs * tile.splits * group * (width + 2)
    found = out.new_empty(size, dtype=torch.float32)
    return found, out.new_zeros(num_pairs, dtype=torch.int32)
