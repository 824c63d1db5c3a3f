"""Triton kernels of decoding steps, in which every row has one new token.

Latency bounds steps of few rows, so a kernel does what would else be two: products gate, or leave
the sum of their parts to the norm that follows; attention turns queries and keys itself and writes
the cache. R rows, K columns of a factor, D head width. Sums are in float32.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moored.engine.fast.rows import Rows
from moored.engine.fast.tiles import AttentionTile, Tile

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def has_copy_engine(device: torch.device) -> bool:
    """True on Hopper, for which `hopper_products` and `hopper_attention` are."""
    return _generation(device) == 9


def overlap_options(device: torch.device) -> dict[str, Any]:
    """Let a kernel be launched while the one before it still runs, where the device can."""
    can = _generation(device) >= 9
    return {"OVERLAPS": True, "launch_pdl": True} if can else {"OVERLAPS": False}


@triton.jit
def wait_for_inputs():
    """Go on once the kernel before has ended, and let the next one be launched.

    In this order everything but the output of the kernel right before can be read without waiting.
    """
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def _linear(
    x,
    weight,
    bias,
    out,
    R,
    N,
    K,
    columns_each,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    start = part * columns_each
    stop = tl.minimum(K, start + columns_each)
    k = tl.arange(0, BK)
    # What lies outside is computed from the last row and not stored.
    x_at = x + tl.minimum(m, R - 1).to(tl.int64)[:, None] * K + start + k[None, :]
    line = tl.minimum(n, N - 1).to(tl.int64) * K
    w_at = weight + line[:, None] + start + k[None, :]
    if OVERLAPS:
        wait_for_inputs()
    acc = tl.zeros([BM, BN], tl.float32)
    if GATED:
        other = tl.zeros([BM, BN], tl.float32)
        up_at = w_at + N.to(tl.int64) * K
    for at in range(start, stop, BK):
        inside = (at + k < stop)[None, :]
        a = tl.load(x_at) if EVEN else tl.load(x_at, mask=inside, other=0.0)
        w = tl.load(w_at) if EVEN else tl.load(w_at, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            u = tl.load(up_at) if EVEN else tl.load(up_at, mask=inside, other=0.0)
            other = tl.dot(a, tl.trans(u), other, input_precision="ieee")
            up_at += BK
        x_at += BK
        w_at += BK
    if HAS_BIAS:
        share = tl.load(bias + tl.minimum(n, N - 1)).to(tl.float32)[None, :]
        acc += tl.where(part == 0, share, 0.0)
    if GATED:
        acc = acc * tl.sigmoid(acc) * other
    inside = (m < R)[:, None] & (n < N)[None, :]
    at = (part * R + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(out + at, acc, mask=inside)


def linear(
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
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_lines, tile.lines), tile.parts)
    _linear[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_rows,
        num_lines,
        num_columns,
        each,
        HAS_BIAS=bias is not None,
        GATED=gated,
        EVEN=num_columns % tile.columns == 0,
        BM=tile.rows,
        BN=tile.lines,
        BK=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap_options(x.device),
    )
    return out


@triton.jit
def _turned(source, gain, cos, sin, position, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads at `source` (M,) normed and turned by their position: (M, D) in float32."""
    half = tl.arange(0, D // 2)
    at = source[:, None] + half[None, :]
    first, second = tl.load(at).to(tl.float32), tl.load(at + D // 2).to(tl.float32)
    if HAS_NORM:
        power = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(power / D + eps)[:, None]
        first = first * scale * tl.load(gain + half)[None, :]
        second = second * scale * tl.load(gain + D // 2 + half)[None, :]
    c = tl.load(cos + position * (D // 2) + half)[None, :]
    s = tl.load(sin + position * (D // 2) + half)[None, :]
    both = tl.join(first * c - second * s, second * c + first * s)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (source.shape[0], D))


@triton.jit
def _take_in(
    q,
    keys,
    values,
    length,
    scale,
    best,
    total,
    acc,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take `length` cells of a slot into a running softmax, N at a time."""
    d = tl.arange(0, D)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        exists = column < length
        cell = column[:, None] * D + d[None, :]
        k = tl.load(keys + cell, mask=exists[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(exists[None, :], scores, -1e30)
        peak = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - peak)
        weight = tl.exp2(scores - peak[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        v = tl.load(values + cell, mask=exists[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = peak
    return best, total, acc


@triton.jit
def _attend_one(
    qkv,
    keys,
    values,
    cos,
    sin,
    q_norm,
    k_norm,
    out,
    slots,
    starts,
    befores,
    prefix_slots,
    prefix_lengths,
    eps,
    scale,
    capacity,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    token = tl.load(starts + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    before = tl.load(befores + row)
    prefix_slot = tl.load(prefix_slots + row).to(tl.int64)
    prefix_length = tl.load(prefix_lengths + row)
    prefix_base = (prefix_slot * KV + kv_head) * capacity * D
    base = (slot * KV + kv_head) * capacity * D
    if OVERLAPS:
        wait_for_inputs()
    d = tl.arange(0, D)
    member = tl.arange(0, M)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    line = qkv + token * (H + 2 * KV) * D
    position = prefix_length + before
    dtype = keys.dtype.element_ty
    q = _turned(line + head * D, q_norm, cos, sin, position, eps, D, HAS_NORM).to(dtype)
    k_at = line + (H + kv_head) * D + tl.zeros([1], tl.int32)
    k = _turned(k_at, k_norm, cos, sin, position, eps, D, HAS_NORM).to(dtype)
    v = tl.load(line + (H + KV + kv_head) * D + d[None, :])
    cell = base + before * D + d[None, :]
    tl.store(keys + cell, k)
    tl.store(values + cell, v)
    # Powers of 2 are the faster ones.
    scale = scale * LOG2_E
    # The new token comes first, and is not read back from the cache.
    best = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
    total = tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, D], tl.float32) + v.to(tl.float32)
    best, total, acc = _take_in(
        q, keys + prefix_base, values + prefix_base, prefix_length, scale, best, total, acc,
        D, N, PRECISION,
    )  # fmt: skip
    best, total, acc = _take_in(
        q, keys + base, values + base, before, scale, best, total, acc, D, N, PRECISION
    )
    o_at = (token * H + head)[:, None] * D + d[None, :]
    tl.store(out + o_at, acc / total[:, None], mask=(member < GROUP)[:, None])


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
    """One new token per row: its keys and values go to the cache, its attention to `out`."""
    _, kv_heads, capacity, width = keys.shape
    group = num_heads // kv_heads
    q_norm, k_norm = norms or tables
    _attend_one[(len(rows.slots), kv_heads)](
        qkv,
        keys,
        values,
        *tables,
        q_norm,
        k_norm,
        out,
        rows.slots,
        rows.starts,
        rows.befores,
        rows.prefix_slots,
        rows.prefix_lengths,
        eps,
        scale,
        capacity,
        H=num_heads,
        KV=kv_heads,
        D=width,
        GROUP=group,
        M=max(16, triton.next_power_of_2(group)),
        N=tile.cells,
        HAS_NORM=norms is not None,
        PRECISION="tf32" if keys.element_size() == 2 else "ieee",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap_options(qkv.device),
    )
    return out
