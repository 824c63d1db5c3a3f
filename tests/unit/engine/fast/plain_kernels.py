"""What `layer_kernels` computes, in torch: the same functions for machines without Triton."""

from __future__ import annotations

import sys

import pytest
import torch

NAME = "layer_kernels"


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch, module: object | None = None) -> None:
    """Let fused layers use the functions of this module, or of another, instead of kernels."""
    from moored.engine import fast

    chosen = module or sys.modules[__name__]
    monkeypatch.setitem(sys.modules, f"{fast.__name__}.{NAME}", chosen)  # pyright: ignore
    monkeypatch.setattr(fast, NAME, chosen, raising=False)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = x.float()
    scales = torch.rsqrt(exact.pow(2).mean(dim=-1) + eps)
    return (exact * scales[..., None] * weight.float()).to(dtype), scales


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    slope, unit = grad.float(), x.float() * scales[..., None]
    d_weight = (slope * unit).flatten(0, -2).sum(dim=0)
    slope = slope * weight.float()
    shared = (slope * unit).mean(dim=-1, keepdim=True)
    return (scales[..., None] * (slope - unit * shared)).to(x.dtype), d_weight


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x + delta
    return total, *norm(total, weight, eps, dtype)


def add_norm_backward(
    grad: torch.Tensor,
    d_total: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_norm, d_weight = norm_backward(grad, total, weight, scales)
    d_x = d_norm + d_total
    return d_x, d_x.to(dtype, copy=True), d_weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    exact = gate.float()
    return (exact * exact.sigmoid() * up.float()).to(gate.dtype)


def silu_mul_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    slope, g = grad.float(), gate.float()
    s = g.sigmoid()
    d_gate = slope * up.float() * s * (1.0 + g * (1.0 - s))
    return d_gate.to(gate.dtype), (slope * g * s).to(up.dtype)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
) -> tuple[torch.Tensor, torch.Tensor]:
    half = q.shape[-1] // 2
    c, s = cos[:, None, :half].float(), sin[:, None, :half].float() * sign

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)

    return turned(q), turned(k)
