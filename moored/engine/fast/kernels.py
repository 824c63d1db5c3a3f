"""Triton kernels of a forward pass over slots: everything between the matrix products.

Rows are sequences, each with a slot of the cache (slots, KV heads, capacity, head width). Shapes:
N new tokens of all rows together, R rows, D head width. Sums are in float32. Norms, steps of few
rows and the draw have files of their own.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from moored.engine.fast import decode_kernels, gated_kernels, hopper_attention, hopper_products
from moored.engine.fast.decode_kernels import has_copy_engine, overlap_options, wait_for_inputs
from moored.engine.fast.draw_kernels import draw as draw
from moored.engine.fast.norm_kernels import add_norm as add_norm
from moored.engine.fast.norm_kernels import embed_norm as embed_norm
from moored.engine.fast.rows import Rows
from moored.engine.fast.tiles import (
    AttentionTile,
    attention_tile,
    cells_at_once,
    gated_tile,
    tile_of,
)

MOST_PARTS = 8
"""Of a product that `add_norm` adds up."""
LOG2_E = math.log2(math.e)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, most_parts: int = 1
) -> torch.Tensor:
    """x @ weight^T + bias; where it may be in parts perhaps (parts, R, lines), to be added up."""
    made = _own_product(x, weight, bias, most_parts=most_parts)
    return F.linear(x, weight, bias) if made is None else made


def finish_layer(
    x: torch.Tensor, mixed: torch.Tensor, layer: Mapping[str, Any], eps: float, y: torch.Tensor
) -> torch.Tensor:
    """x += what attention gave, in place; what the gated units give, for the next `add_norm`."""
    out, bias = layer["out"], layer["out_bias"]
    add_norm(x, linear(mixed, out, bias, most_parts=MOST_PARTS), layer["after"], eps, y)
    inner = _gated(y, layer["gate_up"])
    return linear(inner, layer["down"], None, most_parts=MOST_PARTS)


def _gated(y: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    inner = _own_product(y, gate_up, None, gated=True)
    if inner is not None:
        return inner
    lines, columns = gate_up.shape
    tile = gated_tile(len(y), lines, columns, y.dtype, copies=has_copy_engine(y.device))
    if tile is not None:
        gate, up = gate_up.chunk(2)
        return gated_kernels.gated_product(y, gate, up, tile)
    made = F.linear(y, gate_up)
    return silu_mul(made, made.new_empty((len(made), made.shape[1] // 2)))


def _own_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    most_parts: int = 1,
) -> torch.Tensor | None:
    """A product by a kernel of its own; None: the library is faster."""
    copies = has_copy_engine(x.device)
    shape = len(x), len(weight) // 2 if gated else len(weight)
    lines, columns = weight.shape
    tile = tile_of(
        len(x), lines, columns, x.dtype, gated=gated, most_parts=most_parts, copies=copies
    )
    if tile is None:
        return None
    if tile.parts > 1:
        out = x.new_empty((tile.parts, *shape), dtype=torch.float32)
    else:
        out = x.new_empty(shape)
    multiply = hopper_products.product if tile.is_early else decode_kernels.linear
    return multiply(x, weight, bias, out, tile, gated=gated)


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
    first,
    length,
    position,
    scale,
    best,
    total,
    acc,
    D: tl.constexpr,
    N: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the cells from `first` to `length` of a slot into a running softmax, to the base 2.

    Queries see cells <= their position; `IS_WHOLE`: all of them, in whole blocks.
    """
    d = tl.arange(0, D)
    for at in range(first, length, N):
        column = at + tl.arange(0, N)
        exists = column < length
        cell = base + column[:, None] * D + d[None, :]
        if IS_WHOLE:
            k = tl.load(keys + cell)
        else:
            k = tl.load(keys + cell, mask=exists[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if not IS_WHOLE:
            seen = (column[None, :] <= position[:, None]) & exists[None, :]
            scores = tl.where(seen, scores, -1e30)
        peak = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - peak)
        weight = tl.exp2(scores - peak[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if IS_WHOLE:
            v = tl.load(values + cell)
        else:
            v = tl.load(values + cell, mask=exists[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = peak
    return best, total, acc


@triton.jit
def _absorb_slot(
    q,
    keys,
    values,
    base,
    seen,
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
    """Take in `length` cells, of which all queries see the first `seen`."""
    whole = seen // N * N
    best, total, acc = _absorb(
        q, keys, values, base, 0, whole, position, scale, best, total, acc,
        D, N, True, PRECISION,
    )  # fmt: skip
    return _absorb(
        q, keys, values, base, whole, length, position, scale, best, total, acc,
        D, N, False, PRECISION,
    )  # fmt: skip


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
        best, total, acc = _absorb_slot(
            q, keys, values, base, prefix_length, prefix_length, everything, scale,
            best, total, acc, D, N, PRECISION,
        )  # fmt: skip
        base = (slot * KV + kv_head) * capacity * D
        length = before + tl.minimum(count, tile + TOKENS)
        best, total, acc = _absorb_slot(
            q, keys, values, base, before + tile + 1, length, before + token, scale,
            best, total, acc, D, N, PRECISION,
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
    _, kv_heads, capacity, width = keys.shape
    group = num_heads // kv_heads
    if rows.max_count == 1:
        tile = _attention_tile(rows, keys, num_heads)
        attend_one = (hopper_attention if tile.is_early else decode_kernels).attend_one
        return attend_one(qkv, keys, values, tables, norms, out, rows, num_heads, eps, scale, tile)
    _store(qkv, keys, values, tables, norms, rows, num_heads, eps)
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
        scale * LOG2_E,
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


def parts_of_heads(rows: Rows, keys: torch.Tensor, num_heads: int) -> int:
    """In how many parts attention takes queries, keys and values of new tokens at most."""
    is_early = rows.max_count == 1 and _attention_tile(rows, keys, num_heads).is_early
    return 2 if is_early else 1


def _attention_tile(rows: Rows, keys: torch.Tensor, num_heads: int) -> AttentionTile:
    _, kv_heads, _, width = keys.shape
    return attention_tile(
        len(rows.slots) * kv_heads,
        num_heads // kv_heads,
        width,
        keys.element_size(),
        copies=has_copy_engine(keys.device),
    )


def plan(_: Rows, __: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Nothing to prepare: programs find their prefix themselves."""
