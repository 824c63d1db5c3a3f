"""Triton kernels of a training pass: what lies between the matrix products of a layer.

Each reads its inputs once and computes in float32. N tokens, D head width.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

NORM_PROGRAMS = 1024
"""Parts in which the gradient of a norm's weight is summed up."""
BLOCK = 1024
"""Numbers that a program takes where rows do not matter, or makes up of several rows."""


@triton.jit
def _norm(
    x,
    delta,
    weight,
    total,
    out,
    scales,
    width,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at, inside = row * width + columns, columns < width
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(scales + row, scale)
    tl.store(out + at, values * scale * gain, mask=inside)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of each row, and (N,) what rows were multiplied by."""
    return _normed(x, None, x, weight, eps, dtype)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + delta, its RMS norm, and (N,) what rows were multiplied by; x of any shape (…, width).

    What is handed on from layer to layer must be no view: FSDP2 warns of those.
    """
    total = torch.empty_like(x)
    return total, *_normed(x, delta, total, weight, eps, dtype)


def _normed(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    rows, out = x.numel() // width, torch.empty_like(x, dtype=dtype)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        total,
        out,
        scales,
        width,
        eps,
        ADDS=delta is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out, scales


@triton.jit
def _norm_backward(
    grad,
    d_total,
    x,
    weight,
    scales,
    d_x,
    d_delta,
    d_weights,
    rows,
    width,
    programs,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    start = program.to(tl.int64) * width
    for row in range(program, rows, programs):
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + start + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        sums += slope * values * scale
        slope = slope * gain
        # The scale depends on every value of the row.
        shared = tl.sum(slope * values) * scale * scale / width
        found = scale * (slope - values * shared)
        if ADDS:
            found += tl.load(d_total + start + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_delta + start + columns, found, mask=inside)
        tl.store(d_x + start + columns, found, mask=inside)
        start += programs * width
    tl.store(d_weights + program * width + columns, sums, mask=inside)


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives by the input and by the weight."""
    d_x = torch.empty_like(x)
    return d_x, _normed_backward(grad, None, x, weight, scales, d_x, d_x)


def add_norm_backward(
    grad: torch.Tensor,
    d_total: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Derivatives by the two summands, the second as `dtype`, and by the weight.

    `grad` and `d_total` are those by the norm and by the sum.
    """
    d_x, d_delta = torch.empty_like(total), torch.empty_like(total, dtype=dtype)
    return d_x, d_delta, _normed_backward(grad, d_total, total, weight, scales, d_x, d_delta)


def _normed_backward(
    grad: torch.Tensor,
    d_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    d_x: torch.Tensor,
    d_delta: torch.Tensor,
) -> torch.Tensor:
    width = x.shape[-1]
    rows = x.numel() // width
    programs = max(1, min(NORM_PROGRAMS, rows))
    d_weights = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        grad,
        grad if d_total is None else d_total,
        x,
        weight,
        scales,
        d_x,
        d_delta,
        d_weights,
        rows,
        width,
        programs,
        ADDS=d_total is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return d_weights.sum(dim=0)


def _warps(block: int) -> int:
    return 1 if block <= 256 else 4 if block <= 2048 else 8


@triton.jit
def _silu_mul(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    _silu_mul[grid](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_mul_backward(grad, gate, up, d_gate, d_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(d_up + at, slope * g * s, mask=inside)
    tl.store(d_gate + at, slope * u * s * (1.0 + g * (1.0 - s)), mask=inside)


def silu_mul_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives by both."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    _silu_mul_backward[grid](grad, gate, up, d_gate, d_up, gate.numel(), BLOCK=BLOCK, num_warps=4)
    return d_gate, d_up


@triton.jit
def _rotate(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    sign,
    rows,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is a head of a token: those of queries first, then those of keys.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // (H + KV), row % (H + KV)
    half = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (half < D // 2)[None, :]
    of_query, of_key = inside & (head < H)[:, None], inside & (head >= H)[:, None]
    q_at = ((token * H + head) * D)[:, None] + half[None, :]
    k_at = ((token * KV + head - H) * D)[:, None] + half[None, :]
    first = tl.load(q + q_at, mask=of_query, other=0.0).to(tl.float32)
    first += tl.load(k + k_at, mask=of_key, other=0.0).to(tl.float32)
    second = tl.load(q + q_at + D // 2, mask=of_query, other=0.0).to(tl.float32)
    second += tl.load(k + k_at + D // 2, mask=of_key, other=0.0).to(tl.float32)
    angle = (token * D)[:, None] + half[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32) * sign
    new_first, new_second = first * c - second * s, second * c + first * s
    tl.store(q_out + q_at, new_first, mask=of_query)
    tl.store(k_out + k_at, new_first, mask=of_key)
    tl.store(q_out + q_at + D // 2, new_second, mask=of_query)
    tl.store(k_out + k_at + D // 2, new_second, mask=of_key)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (N, heads, D) turned by angles whose two halves are alike.

    `sign` -1 turns back.
    """
    tokens, heads, width = q.shape
    turned = torch.empty_like(q), torch.empty_like(k)
    rows, half = tokens * (heads + k.shape[1]), triton.next_power_of_2(width // 2)
    each = max(1, BLOCK // half)
    _rotate[(triton.cdiv(rows, each),)](
        q,
        k,
        cos,
        sin,
        *turned,
        sign,
        rows,
        H=heads,
        KV=k.shape[1],
        D=width,
        HALF=half,
        ROWS=each,
        num_warps=4,
    )
    return turned


@triton.jit
def _merge(
    out,
    lse,
    other,
    other_lse,
    tokens,
    lse_stride,
    heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is a head of a token.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < tokens * heads
    token, head = row // heads, row % heads
    a = tl.load(lse + head * lse_stride + token, mask=exists, other=0.0)
    b = tl.load(other_lse + head * tokens + token, mask=exists, other=0.0)
    top = tl.maximum(a, b)
    both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    d = tl.arange(0, BLOCK)
    at, inside = row[:, None] * D + d[None, :], exists[:, None] & (d < D)[None, :]
    first = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    mixed = first * tl.exp(a - both)[:, None] + second * tl.exp(b - both)[:, None]
    tl.store(out + at, mixed, mask=inside)
    tl.store(lse + head * lse_stride + token, both, mask=exists)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """One softmax over two parts, in place of the first; (n, heads, D) and (heads, n)."""
    tokens, heads, width = out.shape
    block = triton.next_power_of_2(width)
    each = max(1, 2 * BLOCK // block)
    _merge[(triton.cdiv(tokens * heads, each),)](
        out,
        lse,
        other,
        other_lse,
        tokens,
        lse.stride(0),
        heads,
        D=width,
        BLOCK=block,
        ROWS=each,
        num_warps=4,
    )
