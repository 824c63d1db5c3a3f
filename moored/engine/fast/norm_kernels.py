"""Triton kernels that add to the residual stream and norm it. Sums are in float32."""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from moored.engine.fast.decode_kernels import has_copy_engine, overlap_options, wait_for_inputs
from moored.engine.fast.tiles import MAX_ROWS

EARLY_WIDTH = 1024
"""Up to here, on Hopper, a norm lets the product behind it begin before it has begun itself."""


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
    IS_EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if IS_EARLY:
        gdc_launch_dependents()
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
    is_early = has_copy_engine(x.device) and rows <= MAX_ROWS and width <= EARLY_WIDTH
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
        IS_EARLY=is_early,
        num_warps=8 if is_early or block > 2048 else 4,
        **overlap_options(x.device),
    )
    return out
