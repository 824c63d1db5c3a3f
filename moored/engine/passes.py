"""What every learner computes of a packed micro-batch: log-probabilities, values, losses.

Plain functions of modules and tensors; where they run and how gradients are gathered is the
learner's affair. S continuation tokens.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moored.config import AlgorithmConfig
from moored.engine.local.head import token_logprobs
from moored.engine.packing import Packed, TokenBatch
from moored.errors import MooredError
from moored.training.losses import TokenStream, policy_loss, value_loss

ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Parts = dict[str, torch.Tensor]
"""Sums over a micro-batch by name; those named `*_max` are largest values."""


def trunk_of(model: nn.Module) -> nn.Module:
    """The decoder without its head; LoRA layers sit inside it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    return getattr(inner, inner.base_model_prefix)  # pyright: ignore[reportArgumentType]


def hidden_states(trunk: nn.Module, packed: Packed) -> torch.Tensor:
    """(S, width) output at the sources of `packed`."""
    if packed.images:
        raise MooredError(
            f"a batch holds {len(packed.images)} images, but this model reads text only; choose a "
            f"text view of the environment"
        )
    kind = packed.input_ids.device.type
    dtype = next(trunk.parameters()).dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    extra = {} if packed.tree is None else {"tree": packed.tree}
    if packed.segments is None:
        # Models hand on a mask of four dimensions as it is; beside a tree nothing reads it.
        mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=packed.input_ids.device)
    else:
        mask = tree_mask(packed.segments, dtype)
    # cuDNN builds a plan for every new shape, which takes longer than the attention itself.
    with sdpa_kernel(ATTENTION) if kind == "cuda" else nullcontext():
        output = trunk(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=mask,
            use_cache=False,
            **extra,
        ).last_hidden_state
    return output.reshape(-1, output.shape[-1]).index_select(0, packed.sources)


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


class Critic(nn.Module):
    """A value for every position: a copy of the policy's trunk and a linear head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(trunk_of(model))
        width = next(reversed(list(self.trunk.parameters()))).shape[-1]
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packed: Packed) -> torch.Tensor:
        """(S,) value before each continuation token."""
        hidden = hidden_states(self.trunk, packed).float()
        # Not as a matrix product, which autocast would round to bfloat16.
        return (hidden * self.head.weight).sum(dim=-1) + self.head.bias


def logprobs_pass(model: nn.Module, packed: Packed, *, temperature: float) -> torch.Tensor:
    """(S,) log-probability of each target."""
    hidden = hidden_states(trunk_of(model), packed)
    return token_logprobs(
        model, hidden, packed.targets, temperature=temperature, with_entropy=False
    )[0]


def policy_pass(
    model: nn.Module,
    batch: TokenBatch,
    options: AlgorithmConfig,
    *,
    temperature: float,
    sequence_ratio: bool,
) -> tuple[torch.Tensor, Parts]:
    """Policy loss of a micro-batch, and its parts for the log."""
    streams = batch.streams
    logp, entropy = token_logprobs(
        model,
        hidden_states(trunk_of(model), batch.packed),
        batch.packed.targets,
        temperature=temperature,
        with_entropy=True,
    )
    stream = TokenStream(
        logp=logp,
        entropy=entropy,
        old_logp=streams["old_logprobs"],
        ref_logp=streams.get("reference"),
        advantages=streams["advantages"],
        weights=streams["weights"],
        sequence=streams["sequence"],
    )
    loss, parts = policy_loss(stream, options, sequence_ratio=sequence_ratio)
    with torch.no_grad():
        parts |= _distance_parts(stream, options)
    return loss, parts


def _distance_parts(stream: TokenStream, options: AlgorithmConfig) -> Parts:
    """How far the policy is from the one that wrote the tokens."""
    log_ratio = stream.logp.detach() - stream.old_logp
    ratio = log_ratio.exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    clipped = ((ratio < low) | (ratio > high)).float()
    # Tokens that only fill up a batch have no weight.
    counts = (stream.weights != 0.0).float()
    return {
        "clip_fraction": (stream.weights * clipped).sum(),
        "old_policy_kl": (stream.weights * (ratio - 1.0 - log_ratio)).sum(),
        "gap_count": counts.sum(),
        "gap_sum": (counts * log_ratio.abs()).sum(),
        "gap_max": (counts * log_ratio.abs()).amax(),
        "ratio_sum": (counts * ratio).sum(),
        "ratio_square_sum": (counts * ratio * ratio).sum(),
    }


def critic_pass(critic: Critic, batch: TokenBatch, value_clip: float | None) -> torch.Tensor:
    """Value loss of a micro-batch."""
    streams, values = batch.streams, critic(batch.packed)
    error = value_loss(values, streams["old_values"], streams["returns"], value_clip)
    return (streams["weights"] * error).sum()
