"""Triton kernels of one decoding step: everything between the matrix products.

Rows are sequences, each with a slot of the cache (slots, KV heads, capacity, head width). Shapes:
N new tokens of all rows together, R rows, D head width, V vocabulary. Sums are in float32.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moored.engine.fast.rows import MAX_STOPS, Rows


@triton.jit
def _add_norm(x, delta, weight, out, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * width + columns, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, values * scale * gain, mask=inside)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """x += delta in place (float32), then `out` = RMS norm of x."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        width,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """silu(left half) * right half."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
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


def rope_store(
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
    out: torch.Tensor,
    rows: Rows,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    """Attention of each row's new tokens to its prefix and, causally, to its own slot."""
    _, kv_heads, capacity, width = keys.shape
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(group)
    tokens = 1 if rows.max_count == 1 else max(1, 64 // padded)
    # One new token leaves little to share between warps: small programs, many of them.
    warps, stages = (1 if width <= 64 else 2, 3) if rows.max_count == 1 else (4, 2)
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
        N=64,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    return out


def plan(_: Rows, __: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Nothing to prepare: programs find their prefix themselves."""


@triton.jit
def _mix(seed, count):
    """SplitMix64 of the count-th state after `seed`: a uniform number in (0, 1)."""
    z = seed.to(tl.uint64) + (count.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> 40).to(tl.float32) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def _draw(
    logits,
    inverse_temperature,
    stops,
    max_tokens,
    seeds,
    requests,
    tokens,
    cells,
    counts,
    running,
    out_tokens,
    out_logps,
    V,
    out_stride,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_live = tl.load(running + row)
    if is_live != 0:
        beta = tl.load(inverse_temperature)
        # Temperature 0 is stored as an inverse of 0: take the likeliest, report it at 1.
        factor = tl.where(beta == 0.0, 1.0, beta)
        columns = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for at in range(0, V, BLOCK):
            inside = at + columns < V
            value = tl.load(logits + row * V + at + columns, mask=inside, other=-1e30)
            value = value.to(tl.float32) * factor
            peak = tl.maximum(best, value)
            total = total * tl.exp(best - peak) + tl.where(inside, tl.exp(value - peak), 0.0)
            best = peak
        peak = tl.max(best)
        mass = tl.sum(total * tl.exp(best - peak))
        count = tl.load(counts + row)
        target = _mix(tl.load(seeds + row), count) * mass
        passed = 0.0
        at = 0
        found = -1
        last = 0
        while (found < 0) & (at < V):
            inside = at + columns < V
            value = tl.load(logits + row * V + at + columns, mask=inside, other=-1e30)
            value = value.to(tl.float32) * factor
            if beta == 0.0:
                hit = inside & (value >= peak)
            else:
                share = tl.where(inside, tl.exp(value - peak), 0.0)
                hit = inside & (passed + tl.cumsum(share) >= target) & (share > 0.0)
                passed += tl.sum(share)
                # Rounding may leave the sum short of the target: then the last token with mass.
                last = tl.maximum(last, tl.max(tl.where(share > 0.0, at + columns, 0)))
            first = tl.min(tl.where(hit, at + columns, V))
            found = tl.where(first < V, first, -1)
            at += BLOCK
        token = tl.where(found < 0, last, found)
        value = tl.load(logits + row * V + token).to(tl.float32) * factor
        request = tl.load(requests + row).to(tl.int64)
        tl.store(out_tokens + request * out_stride + count, token)
        tl.store(out_logps + request * out_stride + count, value - peak - tl.log(mass))
        tl.store(tokens + row, token)
        tl.store(counts + row, count + 1)
        tl.store(cells + row, tl.load(cells + row) + 1)
        stop_ids = tl.load(stops + tl.arange(0, NUM_STOPS))
        is_stop = tl.max((stop_ids == token).to(tl.int32))
        has_room = (count + 1 < tl.load(max_tokens)).to(tl.int32)
        tl.store(running + row, (1 - is_stop) * has_room)


def draw(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    stops: torch.Tensor,
    max_tokens: torch.Tensor,
    state: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Draw the next token of every running row by inverting its distribution function.

    `state`: (R,) seeds, requests, tokens, cells, counts, running; the last four are updated. A row
    stops at one of `stops` (MAX_STOPS,) and after `max_tokens` (1,) tokens.
    """
    rows, vocabulary = logits.shape
    _draw[(rows,)](
        logits,
        inverse_temperature,
        stops,
        max_tokens,
        *state,
        *outputs,
        vocabulary,
        outputs[0].shape[1],
        NUM_STOPS=MAX_STOPS,
        BLOCK=min(4096, triton.next_power_of_2(vocabulary)),
        num_warps=8 if vocabulary > 2048 else 4,
    )
