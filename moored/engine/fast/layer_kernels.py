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


@triton.jit
def _norm(x, weight, out, scales, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(scales + row, scale)
    tl.store(out + row * width + columns, values * scale * gain, mask=inside)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of each row, and (N,) what rows were multiplied by."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=dtype)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](x, weight, out, scales, width, eps, BLOCK=block, num_warps=_warps(block))
    return out, scales


@triton.jit
def _norm_backward(
    grad, x, weight, scales, d_x, d_weights, rows, width, programs, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    start = program.to(tl.int64) * width
    for row in range(program, rows, programs):
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + start + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        total += slope * values * scale
        slope = slope * gain
        # The scale depends on every value of the row.
        shared = tl.sum(slope * values) * scale * scale / width
        tl.store(d_x + start + columns, scale * (slope - values * shared), mask=inside)
        start += programs * width
    tl.store(d_weights + program * width + columns, total, mask=inside)


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives by the input and by the weight."""
    rows, width = x.shape
    d_x = torch.empty_like(x)
    programs = max(1, min(NORM_PROGRAMS, rows))
    d_weights = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        grad,
        x,
        weight,
        scales,
        d_x,
        d_weights,
        rows,
        width,
        programs,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return d_x, d_weights.sum(dim=0)


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
    x, cos, sin, out, sign, heads, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    half, head = tl.arange(0, HALF), tl.arange(0, HEADS)
    exists = half < D // 2
    inside = (head < heads)[:, None] & exists[None, :]
    at = token * heads * D + head[:, None] * D + half[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * D + half, mask=exists, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + token * D + half, mask=exists, other=0.0)[None, :].to(tl.float32) * sign
    tl.store(out + at, first * c - second * s, mask=inside)
    tl.store(out + at + D // 2, second * c + first * s, mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """(N, heads, D) turned by angles whose two halves are alike; `sign` -1 turns back."""
    tokens, heads, width = x.shape
    out = torch.empty_like(x)
    _rotate[(tokens,)](
        x,
        cos,
        sin,
        out,
        sign,
        heads,
        D=width,
        HALF=triton.next_power_of_2(width // 2),
        HEADS=triton.next_power_of_2(heads),
        num_warps=4,
    )
    return out


@triton.jit
def _merge(
    out, lse, other, other_lse, tokens, lse_stride, heads, D: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    a = tl.load(lse + head * lse_stride + token)
    b = tl.load(other_lse + head * tokens + token)
    top = tl.maximum(a, b)
    both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    d = tl.arange(0, BLOCK)
    at, inside = row * D + d, d < D
    first = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, first * tl.exp(a - both) + second * tl.exp(b - both), mask=inside)
    tl.store(lse + head * lse_stride + token, both)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """One softmax over two parts, in place of the first; (n, heads, D) and (heads, n)."""
    tokens, heads, width = out.shape
    block = triton.next_power_of_2(width)
    sizes = tokens, lse.stride(0), heads
    _merge[(tokens * heads,)](out, lse, other, other_lse, *sizes, D=width, BLOCK=block, num_warps=1)
