"""Policy, KL, entropy and value losses on flat token streams.

Every token carries its weights in the update, so losses are weighted sums. `Algorithm.loss` is one
of the functions of a `TokenStream` below, or one like them. They use methods of tensors alone:
processes that only prepare samples import this file, and need no torch. S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moored.config import AlgorithmConfig
from moored.names import KLEstimator

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenStream:
    """What a policy update needs of each sampled token; all (S,)."""

    logp: torch.Tensor
    entropy: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    """Share of each token in the algorithm's own loss, by its aggregation."""
    mean_weights: torch.Tensor
    """Share of each token in the means of entropy and KL; zero where a token only fills up."""
    sequence: torch.Tensor
    """Number of the sequence each token belongs to."""


Loss = Callable[[TokenStream, AlgorithmConfig], "tuple[torch.Tensor, torch.Tensor]"]
"""The loss of each token (S,), and which tokens it clips (S,), for `learner/clip_fraction`."""


def ppo_clip(stream: TokenStream, options: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old; with A < 0 at most -A dual_clip.

    Without the dual clip one huge ratio could dominate an update.
    """
    advantages, ratio = stream.advantages, (stream.logp - stream.old_logp).exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    loss = (-advantages * ratio).maximum(-advantages * ratio.clamp(low, high))
    if options.dual_clip is not None:
        loss = loss.minimum(-advantages * options.dual_clip).where(advantages < 0.0, loss)
    return loss, (ratio < low) | (ratio > high)


def gspo(stream: TokenStream, options: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clip on one ratio for each sequence, its mean over tokens in log space (2507.18071)."""
    mean = _mean_by(stream.logp - stream.old_logp, stream.sequence)
    return ppo_clip(replace(stream, logp=stream.old_logp + mean), options)


def cispo(stream: TokenStream, options: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r, 1 + high) A log pi; the weight is a constant, so no token loses its gradient.

    MiniMax-M1 (2506.13585), which sets no lower bound on the weight.
    """
    ratio, most = (stream.logp - stream.old_logp).detach().exp(), 1.0 + options.clip_high
    return -ratio.clamp(max=most) * stream.advantages * stream.logp, ratio > most


def imitation(stream: TokenStream, _: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """-A log pi; with advantages of 1, supervised learning."""
    return -stream.advantages * stream.logp, stream.logp.new_zeros(stream.logp.shape).bool()


def policy_loss(
    stream: TokenStream, options: AlgorithmConfig, loss: Loss = ppo_clip
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The terms that the policy minimises the sum of, and sums over its loss tokens for the log.

    The terms are `task`, the algorithm's own `loss`; `entropy`, less the bonus; `kl`. Those that
    are off are left out. Entropy and KL are means over tokens whatever the aggregation of the
    task, so that their coefficients mean the same for every algorithm.
    """
    task, is_clipped = loss(stream, options)
    terms = {"task": (stream.weights * task).sum()}
    parts = {"policy_loss": terms["task"].detach(), **_sums(stream, is_clipped)}
    if options.entropy_coef:
        terms["entropy"] = -options.entropy_coef * (stream.mean_weights * stream.entropy).sum()
    if stream.ref_logp is not None:
        kl = kl_estimate(stream.logp, stream.ref_logp, options.kl_estimator)
        terms["kl"] = options.kl_coef * (stream.mean_weights * kl).sum()
        parts["kl_sum"] = (_counts(stream) * kl.detach()).sum()
    return terms, parts


def _counts(stream: TokenStream) -> torch.Tensor:
    """1 for loss tokens, 0 for those that are masked or only fill up a batch."""
    return (stream.mean_weights != 0.0).float()


def _sums(stream: TokenStream, is_clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    """Over the loss tokens: entropy, and how far the policy is from the one that wrote them."""
    counts, log_ratio = _counts(stream), stream.logp.detach() - stream.old_logp
    ratio = log_ratio.exp()
    return {
        "token_count": counts.sum(),
        "entropy_sum": (counts * stream.entropy.detach()).sum(),
        "clip_fraction_sum": (counts * is_clipped.float()).sum(),
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


def kl_estimate(logp: torch.Tensor, ref_logp: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """KL(pi || ref) per token from samples of pi, with d = logp - ref_logp: k1, k2 or k3.

    k1 = d as a loss has no expected gradient; k3 is unbiased and never negative.
    """
    d = logp - ref_logp
    if kind == "k1":
        return d
    return d**2 / 2.0 if kind == "k2" else (-d).expm1() + d


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
        error = error.maximum((near - returns) ** 2)
    return error / 2.0


def _mean_by(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each value replaced by the mean of its group."""
    # There are at most as many groups as values; counting them would wait for the device.
    zeros = values.new_zeros(values.shape)
    sums = zeros.index_add(0, groups, values)
    counts = zeros.index_add(0, groups, zeros + 1.0)
    return (sums / counts.clamp(min=1.0))[groups]
