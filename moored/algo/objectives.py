"""The maths of an update in plain numpy: policy, KL and value objectives, and the learning rate.

The oracle that the torch losses are tested against, and a place to read each formula.
Shape legend: B rows, T tokens.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from moored.errors import MooredError
from moored.names import AGGREGATIONS, KL_ESTIMATORS, SCHEDULES, check_name


def clip_loss(
    logp: ArrayLike,
    old_logp: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> np.ndarray:
    """Clipped policy loss per token: max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old.

    Where A < 0 the loss is bounded by -A * dual_clip, else one huge ratio could dominate.
    """
    advantage = np.asarray(advantages, dtype=np.float64)
    ratio = np.exp(np.asarray(logp, np.float64) - np.asarray(old_logp, np.float64))
    clipped = np.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = np.maximum(-advantage * ratio, -advantage * clipped)
    if dual_clip is None:
        return loss
    return np.where(advantage < 0.0, np.minimum(loss, -advantage * dual_clip), loss)


def sequence_logp(logp: ArrayLike, old_logp: ArrayLike, mask: ArrayLike) -> np.ndarray:
    """GSPO: per-token log-ratio replaced by its mean over the sequence, as `old_logp + mean`.

    Feed the result to `clip_loss` as `logp`; the ratio is then one number per sequence.
    """
    mask_BT = np.asarray(mask).astype(bool)
    old = np.asarray(old_logp, dtype=np.float64)
    log_ratio = np.where(mask_BT, np.asarray(logp, np.float64) - old, 0.0)
    mean_B = log_ratio.sum(axis=1) / np.maximum(mask_BT.sum(axis=1), 1)
    return old + mean_B[:, None]


def kl_estimate(logp: ArrayLike, ref_logp: ArrayLike, kind: str = "k3") -> np.ndarray:
    """KL(pi || ref) per token from samples of pi, with d = logp - ref_logp.

    k1 = d (unbiased; as a loss its expected gradient is zero), k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    check_name("KL estimator", kind, KL_ESTIMATORS)
    d = np.asarray(logp, dtype=np.float64) - np.asarray(ref_logp, dtype=np.float64)
    if kind == "k1":
        return d
    return d**2 / 2.0 if kind == "k2" else np.expm1(-d) + d


def value_loss(
    values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, *, clip: float | None = 0.5
) -> np.ndarray:
    """Clipped critic loss per token: half the larger squared error of V and of V near V_old."""
    new, old, target = (np.asarray(a, dtype=np.float64) for a in (values, old_values, returns))
    error = (new - target) ** 2
    if clip is not None:
        error = np.maximum(error, (old + np.clip(new - old, -clip, clip) - target) ** 2)
    return error / 2.0


def aggregate(
    loss: ArrayLike,
    mask: ArrayLike,
    how: str = "token_mean",
    *,
    max_length: int | None = None,
) -> float:
    """One number from per-token losses; every denominator is of the whole update.

    `token_mean`: sum / tokens. `seq_mean_token_mean` (GRPO): mean over rows of the row's mean.
    `seq_mean_token_sum`: mean over rows of the row's sum. `constant` (Dr. GRPO): sum divided by
    rows * max_length. Rows without tokens are left out of every mean.
    """
    mask_BT = np.asarray(mask).astype(bool)
    sums_B = np.where(mask_BT, np.asarray(loss, dtype=np.float64), 0.0).sum(axis=1)
    return float((sums_B * token_shares(mask_BT.sum(axis=1), how, max_length=max_length)).sum())


def token_shares(
    tokens: ArrayLike, how: str = "token_mean", *, max_length: int | None = None
) -> np.ndarray:
    """(B,) weight of each token of a row in `aggregate`, from the number of tokens of each row."""
    check_name("aggregation", how, AGGREGATIONS)
    tokens_B = np.asarray(tokens)
    num_rows = int(np.count_nonzero(tokens_B))
    if how == "token_mean":
        divisors_B = np.full(len(tokens_B), tokens_B.sum())
    elif how == "seq_mean_token_mean":
        divisors_B = num_rows * tokens_B
    elif how == "seq_mean_token_sum":
        divisors_B = np.full(len(tokens_B), num_rows)
    elif max_length is not None:
        divisors_B = np.full(len(tokens_B), num_rows * max_length)
    else:
        raise MooredError("aggregation 'constant' divides by max_length; give max_length")
    return 1.0 / np.maximum(divisors_B, 1)


def lr_factor(
    step: int,
    num_steps: int,
    *,
    schedule: str = "constant",
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Factor on the learning rate of training step `step`, counted from 1; nothing is stored.

    Rises as step / warmup_steps to 1, then stays there (`constant`) or falls along a line or half
    a cosine towards `min_ratio`, reached one step after the last: with `min_ratio` 0 the last
    step still learns.
    """
    check_name("schedule", schedule, SCHEDULES)
    if step < 1:
        raise MooredError(f"steps are counted from 1, got {step}")
    if step <= warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min((step - 1 - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    left = 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return min_ratio + (1.0 - min_ratio) * left
