"""Triton kernels of a forward pass over slots: everything between the matrix products.

Rows are sequences, each with a slot of the cache (slots, KV heads, capacity, head width). Shapes:
N new tokens of all rows together, R rows, D head width. Sums are in float32. Steps of few rows and
the draw have kernels of their own, in `decode_kernels` and `draw_kernels`.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from moored.engine.fast import decode_kernels, wide_kernels
from moored.engine.fast.decode_kernels import has_copy_engine, overlap_options, wait_for_inputs
from moored.engine.fast.draw_kernels import draw as draw
from moored.engine.fast.rows import Rows
from moored.engine.fast.tiles import cells_at_once, tile_of


@triton.jit
def _add_norm(
    x,
    delta,
    ids,
    weight,
    out,
    rows,
    width,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if OVERLAPS:
        wait_for_inputs()
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    if PARTS > 0:
        values = tl.load(x + row * width + columns, mask=inside, other=0.0)
        for part in tl.static_range(PARTS):
            at = (part * rows + row) * width + columns
            values += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    else:
        # The residual stream begins as a line of the embedding.
        line = tl.load(ids + row).to(tl.int64) * width
        values = tl.load(delta + line + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * width + columns, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + row * width + columns, values * scale * gain, mask=inside)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """x += delta in place (float32), then `out` = RMS norm of x; `delta` may be in parts."""
    return _normed(x, delta, None, weight, eps, out)


def embed_norm(
    ids: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Lines of the embedding in float32; `out` = their RMS norm."""
    x = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _normed(x, embedding, ids, weight, eps, out)
    return x


def _normed(
    x: torch.Tensor,
    delta: torch.Tensor,
    ids: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x,
        delta,
        x if ids is None else ids,
        weight,
        out,
        rows,
        width,
        eps,
        PARTS=delta.numel() // x.numel() if ids is None else 0,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **overlap_options(x.device),
    )
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias."""
    tile = tile_of(len(x), len(weight), weight.shape[1], x.dtype)
    if tile is None:
        return F.linear(x, weight, bias)
    out = x.new_empty((len(x), len(weight)))
    return decode_kernels.linear(x, weight, bias, out, tile)


def finish_layer(
    x: torch.Tensor, mixed: torch.Tensor, layer: Mapping[str, Any], eps: float, y: torch.Tensor
) -> torch.Tensor:
    """x += what attention gave, in place; what the gated units give, for the next `add_norm`."""
    gate_up = layer["gate_up"]
    inner = x.new_empty((len(x), len(gate_up) // 2), dtype=y.dtype)
    copies = has_copy_engine(x.device)
    gate_tile = tile_of(len(x), len(gate_up), gate_up.shape[1], y.dtype, gated=True, copies=copies)
    add_norm(x, _summands(mixed, layer["out"], layer["out_bias"]), layer["after"], eps, y)
    if gate_tile is None:
        silu_mul(F.linear(y, gate_up), inner)
    elif gate_tile.is_wide:
        wide_kernels.wide_linear(y, gate_up, inner, gate_tile, gated=True)
    else:
        decode_kernels.linear(y, gate_up, None, inner, gate_tile, gated=True)
    return _summands(inner, layer["down"], None)


def _summands(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias, or (parts, R, lines) that `add_norm` adds up."""
    copies = bias is None and has_copy_engine(x.device)
    tile = tile_of(len(x), len(weight), weight.shape[1], x.dtype, in_parts=True, copies=copies)
    if tile is None:
        return F.linear(x, weight, bias)
    dtype = torch.float32 if tile.parts > 1 else x.dtype
    out = x.new_empty((tile.parts, len(x), len(weight)), dtype=dtype)
    if tile.is_wide:
        return wide_kernels.wide_linear(x, weight, out, tile)
    return decode_kernels.linear(x, weight, bias, out, tile)


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if OVERLAPS:
        wait_for_inputs()
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """silu(left half) * right half."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    options = overlap_options(out.device)
    grid = (rows, triton.cdiv(width, block))
    _silu_mul[grid](gate_up, out, width, BLOCK=block, num_warps=4, **options)
    return out


@triton.jit
def _rope_store(
    qkv,
    keys,
    values,
    cos,
    sin,
    q_norm,
    k_norm,
    slots,
    cells,
    offsets,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    capacity,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.load(cells + token).to(tl.int64)
    position = at + tl.load(offsets + token)
    half = tl.arange(0, D // 2)
    heads = tl.arange(0, HEADS)
    # Query and key heads stand first and are turned; value heads are only copied.
    turned = heads < H + KV
    source = qkv + token * (H + 2 * KV) * D + heads[:, None] * D + half[None, :]
    first = tl.load(source, mask=turned[:, None], other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=turned[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        power = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(power / D + eps)
        is_query = (heads < H)[:, None]
        gain_1 = tl.where(
            is_query, tl.load(q_norm + half)[None, :], tl.load(k_norm + half)[None, :]
        )
        gain_2 = tl.where(
            is_query,
            tl.load(q_norm + D // 2 + half)[None, :],
            tl.load(k_norm + D // 2 + half)[None, :],
        )
        first = first * scale[:, None] * gain_1
        second = second * scale[:, None] * gain_2
    c = tl.load(cos + position * (D // 2) + half)[None, :]
    s = tl.load(sin + position * (D // 2) + half)[None, :]
    new_first = first * c - second * s
    new_second = second * c + first * s
    is_query = heads < H
    tl.store(source, new_first, mask=is_query[:, None])
    tl.store(source + D // 2, new_second, mask=is_query[:, None])
    is_key = turned & (heads >= H)
    cell = ((slot * KV + (heads - H)) * capacity + at) * D
    tl.store(keys + cell[:, None] + half[None, :], new_first, mask=is_key[:, None])
    tl.store(keys + cell[:, None] + D // 2 + half[None, :], new_second, mask=is_key[:, None])
    is_value = (heads >= H + KV) & (heads < H + 2 * KV)
    cell = ((slot * KV + (heads - H - KV)) * capacity + at) * D
    value_1 = tl.load(source, mask=is_value[:, None], other=0.0)
    value_2 = tl.load(source + D // 2, mask=is_value[:, None], other=0.0)
    tl.store(values + cell[:, None] + half[None, :], value_1, mask=is_value[:, None])
    tl.store(values + cell[:, None] + D // 2 + half[None, :], value_2, mask=is_value[:, None])


def _store(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rows: Rows,
    num_heads: int,
    eps: float,
) -> None:
    """Turn queries in place, write keys and values of N tokens into their slots."""
    _, kv_heads, capacity, width = keys.shape
    q_norm, k_norm = norms or tables
    _rope_store[(len(qkv),)](
        qkv,
        keys,
        values,
        *tables,
        q_norm,
        k_norm,
        rows.token_slots,
        rows.cells,
        rows.offsets,
        eps,
        H=num_heads,
        KV=kv_heads,
        D=width,
        capacity=capacity,
        HEADS=triton.next_power_of_2(num_heads + 2 * kv_heads),
        HAS_NORM=norms is not None,
        num_warps=4,
    )


@triton.jit
def _absorb(
    q,
    keys,
    values,
    base,
    length,
    position,
    scale,
    best,
    total,
    acc,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take `length` cells of a slot into a running softmax; queries see cells <= their position."""
    d = tl.arange(0, D)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        exists = column < length
        cell = base + column[:, None] * D + d[None, :]
        k = tl.load(keys + cell, mask=exists[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (column[None, :] <= position[:, None]) & exists[None, :]
        scores = tl.where(seen, scores, -1e30)
        peak = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - peak)
        weight = tl.exp(scores - peak[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        v = tl.load(values + cell, mask=exists[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = peak
    return best, total, acc


@triton.jit
def _attend(
    qkv,
    keys,
    values,
    out,
    slots,
    starts,
    counts,
    befores,
    prefix_slots,
    prefix_lengths,
    scale,
    capacity,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.program_id(2) * TOKENS
    count = tl.load(counts + row)
    if tile < count:
        slot = tl.load(slots + row).to(tl.int64)
        start = tl.load(starts + row).to(tl.int64)
        before = tl.load(befores + row)
        prefix_slot = tl.load(prefix_slots + row).to(tl.int64)
        prefix_length = tl.load(prefix_lengths + row)
        line = tl.arange(0, M)
        token = tile + line // GROUP_P
        member = line % GROUP_P
        wanted = (token < count) & (token < tile + TOKENS) & (member < GROUP)
        d = tl.arange(0, D)
        head = kv_head * GROUP + member
        q_at = ((start + token) * (H + 2 * KV) + head) * D
        q = tl.load(qkv + q_at[:, None] + d[None, :], mask=wanted[:, None], other=0.0)
        best = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        base = (prefix_slot * KV + kv_head) * capacity * D
        everything = tl.full([M], 2147483647, tl.int32)
        best, total, acc = _absorb(
            q, keys, values, base, prefix_length, everything, scale, best, total, acc,
            D, N, PRECISION,
        )  # fmt: skip
        base = (slot * KV + kv_head) * capacity * D
        length = before + tl.minimum(count, tile + TOKENS)
        best, total, acc = _absorb(
            q, keys, values, base, length, before + token, scale, best, total, acc,
            D, N, PRECISION,
        )  # fmt: skip
        o_at = ((start + token) * H + head) * D
        tl.store(out + o_at[:, None] + d[None, :], acc / total[:, None], mask=wanted[:, None])


def attend(
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
) -> torch.Tensor:
    """Write keys and values of N tokens into their slots, then attend to prefix and slot.

    A row's new tokens see its prefix and, causally, its own slot.
    """
    if rows.max_count == 1:
        return decode_kernels.attend_one(
            qkv, keys, values, tables, norms, out, rows, num_heads, eps, scale
        )
    _store(qkv, keys, values, tables, norms, rows, num_heads, eps)
    _, kv_heads, capacity, width = keys.shape
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(group)
    tokens = max(1, 64 // padded)
    _attend[(len(rows.slots), kv_heads, triton.cdiv(rows.max_count, tokens))](
        qkv,
        keys,
        values,
        out,
        rows.slots,
        rows.starts,
        rows.counts,
        rows.befores,
        rows.prefix_slots,
        rows.prefix_lengths,
        scale,
        capacity,
        H=num_heads,
        KV=kv_heads,
        D=width,
        GROUP=group,
        GROUP_P=padded,
        TOKENS=tokens,
        M=max(16, triton.next_power_of_2(tokens * padded)),
        N=cells_at_once(width, keys.element_size()),
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    return out


def plan(_: Rows, __: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Nothing to prepare: programs find their prefix themselves."""
