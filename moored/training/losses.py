"""Policy, KL, entropy and value losses on flat token streams; `moored.algo.objectives` is their
oracle. Every token carries its weights in the update, so losses are weighted sums. S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

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
    """Share of each token in the clipped loss, by the algorithm's aggregation."""
    mean_weights: torch.Tensor
    """Share of each token in the means of entropy and KL; zero where a token only fills up."""
    sequence: torch.Tensor
    """Number of the sequence each token belongs to."""


def policy_loss(
    stream: TokenStream,
    options: AlgorithmConfig,
    *,
    sequence_ratio: bool = False,
    likelihood: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of `loss_terms`, and sums over its loss tokens for the log."""
    terms = loss_terms(stream, options, sequence_ratio=sequence_ratio, likelihood=likelihood)
    logp = clipped_logp(stream, sequence_ratio=sequence_ratio).detach()
    parts = {"policy_loss": terms["task"].detach(), **_sums(stream, logp, options)}
    if stream.ref_logp is not None:
        kl = kl_estimate(stream.logp.detach(), stream.ref_logp, options.kl_estimator)
        parts["kl_sum"] = (_counts(stream) * kl).sum()
    return reduce(torch.add, terms.values()), parts


def loss_terms(
    stream: TokenStream,
    options: AlgorithmConfig,
    *,
    sequence_ratio: bool = False,
    likelihood: bool = False,
) -> dict[str, torch.Tensor]:
    """The terms of the policy's loss by name: `task`, the clipped loss; `entropy`, less the bonus;
    `kl`. Those that are off are left out.

    Entropy and KL are means over tokens whatever the aggregation of the clipped loss, so that their
    coefficients mean the same for every algorithm. `sequence_ratio` (GSPO) takes one ratio for a
    sequence, its mean over tokens in log space. With `likelihood` the task is the log-probability
    times the advantage; with advantages of 1, supervised learning.
    """
    if likelihood:
        task = -stream.advantages * stream.logp
    else:
        logp = clipped_logp(stream, sequence_ratio=sequence_ratio)
        task = clip_loss(logp, stream.old_logp, stream.advantages, options)
    terms = {"task": (stream.weights * task).sum()}
    if options.entropy_coef:
        terms["entropy"] = -options.entropy_coef * (stream.mean_weights * stream.entropy).sum()
    if stream.ref_logp is not None:
        kl = kl_estimate(stream.logp, stream.ref_logp, options.kl_estimator)
        terms["kl"] = options.kl_coef * (stream.mean_weights * kl).sum()
    return terms


def clipped_logp(stream: TokenStream, *, sequence_ratio: bool) -> torch.Tensor:
    """Log-probabilities whose ratio to the old ones is clipped."""
    if not sequence_ratio:
        return stream.logp
    return stream.old_logp + _mean_by(stream.logp - stream.old_logp, stream.sequence)


def _counts(stream: TokenStream) -> torch.Tensor:
    """1 for loss tokens, 0 for those that are masked or only fill up a batch."""
    return (stream.mean_weights != 0.0).float()


@torch.no_grad()
def _sums(
    stream: TokenStream, logp: torch.Tensor, options: AlgorithmConfig
) -> dict[str, torch.Tensor]:
    """Over the loss tokens: entropy, and how far the policy is from the one that wrote them.

    `logp` makes the ratio that is clipped; all else is of the tokens' own log-probabilities.
    """
    counts, log_ratio = _counts(stream), stream.logp.detach() - stream.old_logp
    ratio, clipped_ratio = log_ratio.exp(), (logp - stream.old_logp).exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    is_clipped = ((clipped_ratio < low) | (clipped_ratio > high)).float()
    return {
        "token_count": counts.sum(),
        "entropy_sum": (counts * stream.entropy.detach()).sum(),
        "clip_fraction_sum": (counts * is_clipped).sum(),
        "old_policy_kl_sum": (counts * (ratio - 1.0 - log_ratio)).sum(),
        "logp_gap_mean_sum": (counts * log_ratio.abs()).sum(),
        "logp_gap_max": (counts * log_ratio.abs()).amax(),
        "ratio_sum": (counts * ratio).sum(),
        "ratio_square_sum": (counts * ratio * ratio).sum(),
    }


def update_figures(parts: Mapping[str, float]) -> dict[str, float]:
    """Sums over the loss tokens of an update as means over them, which do not depend on weights.

    `effective_share` is the effective sample size of the ratios as a share of the tokens.
    """
    sums = {name.removesuffix("_sum"): x for name, x in parts.items() if name.endswith("_sum")}
    count = max(parts["token_count"], 1.0)
    ratios, squares = sums.pop("ratio"), sums.pop("ratio_square")
    others = {n: x for n, x in parts.items() if n != "token_count" and not n.endswith("_sum")}
    # Rounding may take the share beyond 1.
    share = min(1.0, ratios**2 / (count * squares)) if squares else 1.0
    return {**others, **{n: x / count for n, x in sums.items()}, "effective_share": share}


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
