"""Log-probability and entropy of tokens straight from hidden states, a chunk of tokens at a time.

No [tokens x vocabulary] tensor is ever built or kept: the backward pass computes each chunk's
logits again. S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of one chunk's logits: what stays near the cores; what keeps a GPU busy."""
MIN_CHUNK = 64
"""Tokens that make a matrix product worth its while."""


def token_logprobs(
    model: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probability of each target and entropy of its distribution, in float32."""
    head = _head(model)
    if is_plain_head(model):
        weight = cast(torch.Tensor, head.weight)
        return _Logprobs.apply(hidden, weight, targets, temperature, with_entropy)  # pyright: ignore[reportReturnType]
    parts = []
    for part in _chunks(hidden, cast(torch.Tensor, head.weight).shape[0]):
        args = (model, head, hidden[part], targets[part], temperature)
        parts.append(checkpoint(_chunk_logprobs, *args, use_reentrant=False))
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def scaled_logits(
    model: nn.Module, head: nn.Module, hidden: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Float32 logits divided by the temperature, with the model's own scaling and soft cap."""
    config = model.config
    logits = head(hidden).float()
    scale = getattr(config, "logits_scaling", None)
    if scale is not None:
        logits = logits / scale  # pyright: ignore[reportOperatorIssue]
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)  # pyright: ignore[reportOperatorIssue]
    return logits if temperature in (0.0, 1.0) else logits / temperature


def float_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight^T with float32 results, also of bfloat16 factors."""
    if hidden.dtype == torch.float32 or not hidden.is_cuda:
        return torch.mm(hidden, weight.t()).float()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def _times(logits: torch.Tensor, factor: float) -> torch.Tensor:
    """In place, and not at all for 1: it would pass over all logits."""
    return logits if factor == 1.0 else logits.mul_(factor)


def _head(model: nn.Module) -> nn.Module:
    return cast(nn.Module, model.get_output_embeddings())  # pyright: ignore[reportCallIssue]


def is_plain_head(model: nn.Module) -> bool:
    """True when logits are hidden states times a matrix, and nothing else."""
    head = _head(model)
    is_linear = type(head) is nn.Linear and head.bias is None
    options = ("logits_scaling", "final_logit_softcapping")
    return is_linear and all(getattr(model.config, name, None) is None for name in options)


def _chunks(hidden: torch.Tensor, vocabulary: int) -> Iterator[slice]:
    most = LOGITS_PER_CHUNK.get(hidden.device.type, LOGITS_PER_CHUNK["cuda"])
    size = max(MIN_CHUNK, most // vocabulary)
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)


def _chunk_logprobs(
    model: nn.Module,
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scaled_logits(model, head, hidden, temperature)
    log_z = torch.logsumexp(logits, dim=-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    # H = log Z - E[logit]
    return logp, log_z - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


class _Logprobs(torch.autograd.Function):
    """The same for a head that is one matrix, with the derivatives written out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        ctx.dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        ctx.beta = 1.0 / (temperature or 1.0)
        ctx.set_materialize_grads(False)
        logp, log_z, entropy = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in "abc")
        factor = weight.to(ctx.dtype)
        for part in _chunks(hidden, len(weight)):
            logits = _times(float_logits(hidden[part].to(ctx.dtype), factor), ctx.beta)
            log_z[part] = torch.logsumexp(logits, dim=-1)
            logp[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - log_z[part]
            if with_entropy:
                # H = log Z - E[logit]
                mean = (logits - log_z[part, None]).exp_().mul_(logits).sum(dim=-1)
                entropy[part] = log_z[part] - mean
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        to_logp, to_entropy = grads
        factor = weight.to(ctx.dtype)
        d_hidden = torch.empty_like(hidden)
        trains_weight = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight) if trains_weight else None
        for part in _chunks(hidden, len(weight)):
            h = hidden[part].to(ctx.dtype)
            log_p = _times(float_logits(h, factor), ctx.beta).sub_(log_z[part, None])
            p = log_p.exp()
            d_logits = torch.zeros_like(p)
            if to_logp is not None:
                # d log p_t / d logit_j = [j = t] - p_j
                d_logits.addcmul_(p, to_logp[part, None], value=-1.0)
                d_logits.scatter_add_(-1, targets[part, None], to_logp[part, None])
            if to_entropy is not None:
                # d H / d logit_j = -p_j (log p_j + H)
                slope = log_p.add_(entropy[part, None]).mul_(p)
                d_logits.addcmul_(slope, to_entropy[part, None], value=-1.0)
            d = _times(d_logits, ctx.beta).to(ctx.dtype)
            d_hidden[part] = torch.mm(d, factor).to(hidden.dtype)
            if d_weight is None:
                continue
            if d.dtype == d_weight.dtype:
                d_weight.addmm_(d.t(), h)
            else:
                d_weight += torch.mm(d.t(), h)
        return d_hidden, d_weight, None, None, None
