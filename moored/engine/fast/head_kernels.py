"""Triton kernels of the head: what the loss needs of each row of logits, in one pass over them.

N tokens, V vocabulary. Logits are float32 and not yet divided by the temperature, as are all sums.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _summary(logits, targets, beta, log_z, logp, entropy, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * V
    # Sums of e^(x - top) and of that times (x - top), so that large logits cost no precision.
    top, total, weighted = -1e30, 0.0, 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        x = tl.load(line + columns, mask=inside, other=0.0) * beta
        new_top = tl.maximum(top, tl.max(tl.where(inside, x, -1e30)))
        e = tl.where(inside, tl.exp(x - new_top), 0.0)
        scale = tl.exp(top - new_top)
        weighted = (weighted + (top - new_top) * total) * scale + tl.sum(e * (x - new_top))
        total = total * scale + tl.sum(e)
        top = new_top
    z = top + tl.log(total)
    tl.store(log_z + row, z)
    tl.store(logp + row, tl.load(line + tl.load(targets + row)) * beta - z)
    # H = log Z - E[logit]
    tl.store(entropy + row, tl.log(total) - weighted / total)


def summarize(
    logits: torch.Tensor, targets: torch.Tensor, beta: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N,) log Z, log-probability of the target, entropy; `beta` is 1 / temperature.

    The entropy costs nothing, so it is there in any case.
    """
    rows, vocabulary = logits.shape
    log_z, logp, entropy = (logits.new_empty(rows) for _ in range(3))
    if rows:
        _summary[(rows,)](
            logits, targets, beta, log_z, logp, entropy, vocabulary, BLOCK=BLOCK, num_warps=8
        )
    return log_z, logp, entropy


@triton.jit
def _slopes(
    logits, targets, beta, log_z, entropy, to_logp, to_entropy, out, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x = tl.load(logits + row * V + columns, mask=inside, other=0.0) * beta
    log_p = x - tl.load(log_z + row)
    p = tl.exp(log_p)
    # d log p_t / d logit_j = [j = t] - p_j
    is_target = (columns == tl.load(targets + row)).to(tl.float32)
    slope = tl.load(to_logp + row) * (is_target - p)
    # d H / d logit_j = -p_j (log p_j + H)
    slope -= tl.load(to_entropy + row) * p * (log_p + tl.load(entropy + row))
    tl.store(out + row * V + columns, slope * beta, mask=inside)


def slopes(
    logits: torch.Tensor,
    targets: torch.Tensor,
    beta: float,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    to_logp: torch.Tensor | None,
    to_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(N, V) derivative by the logits, from those by log-probability and entropy."""
    rows, vocabulary = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    zero = torch.zeros_like(log_z)
    given = [zero if grad is None else grad.contiguous() for grad in (to_logp, to_entropy)]
    if rows:
        grid = (rows, triton.cdiv(vocabulary, BLOCK))
        _slopes[grid](
            logits, targets, beta, log_z, entropy, *given, out, vocabulary, BLOCK=BLOCK, num_warps=8
        )
    return out
