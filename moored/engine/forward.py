"""Forward passes of any Hugging Face causal LM over packed rows.

A row holds one prompt and many continuations: an attention mask lets each continuation see the
prompt and itself alone, so the prompt is computed once. Logits exist only for scored tokens, a
chunk at a time; [tokens x vocabulary] is never built.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from moored.batch import Packed

LOGITS_PER_CHUNK = 1 << 24
"""Elements of the largest logits block."""
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def trunk_of(model: nn.Module) -> nn.Module:
    """The decoder without its head; LoRA layers sit inside it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    return getattr(inner, inner.base_model_prefix)  # pyright: ignore[reportArgumentType]


def hidden_states(trunk: nn.Module, packed: Packed) -> torch.Tensor:
    """(S, width) output at the position before every continuation token."""
    kind = packed.input_ids.device.type
    dtype = next(trunk.parameters()).dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    # cuDNN builds a plan for every new shape, which takes longer than the attention itself.
    with sdpa_kernel(ATTENTION) if kind == "cuda" else nullcontext():
        output = trunk(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=tree_mask(packed.segments, dtype),
            use_cache=False,
        ).last_hidden_state
    return output.reshape(-1, output.shape[-1])[packed.sources]


def tree_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, 1, L, L) additive mask: earlier tokens of the prompt or of the same continuation.

    A padding token sees itself, so that no row of the softmax is empty.
    """
    length = segments.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :] & (segments >= 0)[:, :, None]
    allowed = earlier & (own | prompt)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def token_logprobs(
    model: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probability of each target and entropy of its distribution, in float32."""
    head = cast(nn.Module, model.get_output_embeddings())  # pyright: ignore[reportCallIssue]
    vocabulary = cast(torch.Tensor, head.weight).shape[0]
    chunk = max(1, LOGITS_PER_CHUNK // vocabulary)
    if len(targets) <= chunk:
        return _chunk_logprobs(model, head, hidden, targets, temperature, with_entropy)
    parts = []
    for start in range(0, len(targets), chunk):
        args = (hidden[start : start + chunk], targets[start : start + chunk])
        if torch.is_grad_enabled():
            # Keep no logits for the backward pass: compute them again.
            part = checkpoint(
                _chunk_logprobs, model, head, *args, temperature, with_entropy, use_reentrant=False
            )
        else:
            part = _chunk_logprobs(model, head, *args, temperature, with_entropy)
        parts.append(cast(tuple[torch.Tensor, torch.Tensor], part))
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _chunk_logprobs(
    model: nn.Module,
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scaled_logits(model, head, hidden, temperature)
    log_z = torch.logsumexp(logits, dim=-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    if not with_entropy:
        return logp, torch.zeros_like(logp)
    # H = log Z - E[logit]
    return logp, log_z - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)


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
