"""Policy, KL, entropy and value losses on flat token streams; `moored.algo.objectives` is their
oracle. Every token carries its weight in the update, so losses are weighted sums. S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moored.config import AlgorithmConfig
from moored.names import KLEstimator


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenStream:
    """What a policy update needs of each sampled token; all (S,)."""

    logp: torch.Tensor
    entropy: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor
    """Number of the sequence each token belongs to."""


def policy_loss(
    stream: TokenStream, options: AlgorithmConfig, *, sequence_ratio: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of the clipped loss, KL and entropy bonus, and its parts for the log.

    `sequence_ratio` (GSPO) takes one ratio for a sequence, its mean over tokens in log space.
    """
    logp = stream.logp
    if sequence_ratio:
        logp = stream.old_logp + _mean_by(logp - stream.old_logp, stream.sequence)
    clipped = clip_loss(logp, stream.old_logp, stream.advantages, options)
    loss = (stream.weights * clipped).sum()
    entropy = (stream.weights * stream.entropy).sum()
    parts = {"policy_loss": loss.detach(), "weighted_entropy": entropy.detach()}
    if options.entropy_coef:
        loss = loss - options.entropy_coef * entropy
    if stream.ref_logp is not None:
        kl = (
            stream.weights * kl_estimate(stream.logp, stream.ref_logp, options.kl_estimator)
        ).sum()
        loss = loss + options.kl_coef * kl
        parts["weighted_kl"] = kl.detach()
    return loss, parts


def clip_loss(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, options: AlgorithmConfig
) -> torch.Tensor:
    """Clipped policy loss per token, with the dual clip on negative advantages."""
    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if options.dual_clip is None:
        return loss
    return torch.where(advantages < 0.0, torch.minimum(loss, -advantages * options.dual_clip), loss)


def kl_estimate(logp: torch.Tensor, ref_logp: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """k1, k2 or k3 per token."""
    d = logp - ref_logp
    if kind == "k1":
        return d
    return d**2 / 2.0 if kind == "k2" else torch.expm1(-d) + d


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    clip: float | None,
) -> torch.Tensor:
    """Half the larger squared error of V and of V kept near V_old, per token."""
    error = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2.0


def _mean_by(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each value replaced by the mean of its group."""
    # There are at most as many groups as values; counting them would wait for the device.
    sums = torch.zeros_like(values).index_add(0, groups, values)
    counts = torch.zeros_like(values).index_add(0, groups, torch.ones_like(values))
    return (sums / counts.clamp(min=1.0))[groups]
