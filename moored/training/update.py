"""From samples to an updated policy: advantages, token weights, minibatches, learning rate.

Shape legend: B trajectories, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moored import algo
from moored.algo import loss_scale
from moored.config import AlgorithmConfig, Config
from moored.engine.base import Learner
from moored.errors import MooredError
from moored.names import SCHEDULES, check_name
from moored.training.algorithms import Algorithm, GroupEstimator, TokenEstimator, TokenValues
from moored.training.samples import (
    LossSample,
    Sample,
    TokenAdvantages,
    by_trajectory,
    group_ids,
    shaped_rewards,
    token_weights,
)
from moored.types import Group, ScoreRequest, Selection

MISMATCH = ("logp_gap_mean", "logp_gap_max", "effective_share")
"""Statistics of an update: how far sampler and learner are apart on the same weights."""


class NotFiniteError(MooredError):
    """An update that was not made because its numbers are not finite, and its samples."""

    def __init__(self, stats: Mapping[str, float], samples: Sequence[LossSample]) -> None:
        self.stats = stats
        self.samples = samples
        bad = [name for name, value in stats.items() if not np.isfinite(value)]
        super().__init__(
            f"{', '.join(bad)} of an update is not finite, so the update was not made; lower "
            f"optimizer.lr or optimizer.grad_clip and resume"
        )


def with_old_logprobs(
    options: AlgorithmConfig, learner: Learner, samples: list[Sample]
) -> tuple[list[Sample], dict[str, float]]:
    """Samples with the log-probabilities that ratios start from, and how far engines are apart.

    `old_logprobs: sampler` leaves samples as they are; `update` then measures the gap.
    """
    if options.old_logprobs == "sampler" or not samples:
        return samples, {}
    scored = learner.score([ScoreRequest(s.prompt, [s.ids_T], [s.images]) for s in samples])
    gaps = [
        logp[sample.loss_mask_T] - sample.old_logprobs_T[sample.loss_mask_T]
        for sample, (logp,) in zip(samples, scored, strict=True)
    ]
    rescored = [
        replace(
            sample,
            old_logprobs_T=np.where(sample.loss_mask_T, logp, 0.0),
            importance_T=_importance(sample, logp, options.importance_cap),
        )
        for sample, (logp,) in zip(samples, scored, strict=True)
    ]
    gap = np.concatenate(gaps)
    figures = _mismatch(gap)
    if options.importance_cap is not None:
        is_capped = gap > np.log(options.importance_cap)
        figures["mismatch/capped_share"] = float(is_capped.mean())
    return rescored, figures


def _importance(sample: Sample, logp_T: np.ndarray, cap: float | None) -> np.ndarray | None:
    """min(learner / sampler, cap) for each sampled token, 1 for others; None without a cap.

    TRL calls this `vllm_importance_sampling_mode="token_truncate"` with
    `vllm_importance_sampling_clip_max`, verl `rollout_is="token"` with `rollout_is_threshold`.
    """
    if cap is None:
        return None
    gap_T = np.where(sample.loss_mask_T, logp_T - sample.old_logprobs_T, 0.0)
    return np.exp(np.minimum(gap_T, np.log(cap)))


def _mismatch(gaps: np.ndarray) -> dict[str, float]:
    """The figures of `MISMATCH` from learner minus sampler, token by token."""
    ratios = np.exp(gaps)
    figures = (
        np.abs(gaps).mean(),
        np.abs(gaps).max(),
        ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()),
    )
    return {f"mismatch/{name}": float(x) for name, x in zip(MISMATCH, figures, strict=True)}


def estimate_advantages(
    config: Config,
    algorithm: Algorithm,
    learner: Learner,
    groups: Sequence[Group],
    samples: Sequence[Sample],
) -> list[TokenAdvantages]:
    """Advantages of the tokens of each sample; a group's statistics are of all its trajectories."""
    if not samples:
        return []
    estimator = algorithm.advantage
    if isinstance(estimator, TokenEstimator):
        values = learner.values(samples) if estimator.needs_critic else None
        found = token_advantages(samples, values, estimator, config.algorithm)
    else:
        rewards = np.concatenate([shaped_rewards(config, group) for group in groups])
        found = group_advantages(samples, rewards, group_ids(groups), estimator)
    if not (algorithm.whitens or isinstance(estimator, TokenEstimator)):
        return found
    return whitened(samples, found)


def group_advantages(
    samples: Sequence[Sample], rewards: np.ndarray, groups: np.ndarray, estimator: GroupEstimator
) -> list[TokenAdvantages]:
    """One advantage per trajectory, the same for each of its sampled tokens."""
    advantages = np.asarray(estimator(rewards, groups))
    if advantages.shape != rewards.shape:
        raise MooredError(
            f"an advantage estimator must return one number for each of {len(rewards)} "
            f"trajectories, got shape {advantages.shape}"
        )
    return [
        TokenAdvantages(advantages_T=np.where(s.loss_mask_T, advantages[s.trajectory], 0.0))
        for s in samples
    ]


def token_advantages(
    samples: Sequence[Sample],
    values: Sequence[np.ndarray] | None,
    estimator: TokenEstimator,
    options: AlgorithmConfig,
) -> list[TokenAdvantages]:
    """Advantages over the sampled tokens of each trajectory, through all of its samples.

    `values` are the critic's before each token and after the last one, (T + 1,); None: no critic.
    """
    known = values or [np.zeros(len(sample.ids_T) + 1) for sample in samples]
    rows = by_trajectory(samples)
    tokens = _token_values(samples, known, rows)
    if not options.bootstrap_truncated:
        tokens = replace(tokens, bootstrap_B=np.zeros(len(rows)))
    found = estimator.function(tokens, options)
    result: dict[int, TokenAdvantages] = {}
    for row, members in enumerate(rows):
        stop = 0
        for index in members:
            start, stop = stop, stop + len(samples[index].ids_T)
            old = np.where(samples[index].loss_mask_T, known[index][:-1], 0.0)
            result[index] = TokenAdvantages(
                advantages_T=found.advantages[row, start:stop],
                returns_T=None if values is None else found.returns[row, start:stop],
                old_values_T=None if values is None else old,
            )
    return [result[index] for index in range(len(samples))]


def _token_values(
    samples: Sequence[Sample], values: Sequence[np.ndarray], rows: Sequence[Sequence[int]]
) -> TokenValues:
    """The samples of each row one after another; only its last may have been cut off."""

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return _padded([np.concatenate([arrays[index] for index in members]) for members in rows])

    last = [members[-1] for members in rows]
    return TokenValues(
        rewards_BT=joined([s.rewards_T for s in samples]),
        values_BT=joined([values_T1[:-1] for values_T1 in values]),
        mask_BT=joined([s.loss_mask_T for s in samples]),
        turn_ends_BT=joined([s.turn_ends_T for s in samples]),
        bootstrap_B=np.array([values[i][-1] if samples[i].is_truncated else 0.0 for i in last]),
    )


def whitened(
    samples: Sequence[Sample], advantages: Sequence[TokenAdvantages]
) -> list[TokenAdvantages]:
    """Advantages with mean 0 and variance 1 over the loss tokens of samples that have a weight."""
    flat = np.concatenate([found.advantages_T for found in advantages])
    kept = [s.loss_mask_T & (s.weight != 0.0) for s in samples]
    stops = np.cumsum([len(sample.ids_T) for sample in samples])
    parts = np.split(algo.whiten(flat, np.concatenate(kept)), stops[:-1])
    return [
        replace(found, advantages_T=part) for found, part in zip(advantages, parts, strict=True)
    ]


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """(B, T), filled up with zeros."""
    padded = np.zeros((len(arrays), max(map(len, arrays))), dtype=np.result_type(*arrays))
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


def update(
    config: Config,
    algorithm: Algorithm,
    learner: Learner,
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    selection: Selection,
    step: int,
) -> dict[str, float]:
    """Minibatch updates; their number does not depend on what the filter kept.

    A minibatch without a token to train on is skipped: an optimiser with momentum would move the
    weights without any gradient.
    """
    planned = _minibatches(config, algorithm, samples, advantages, step)
    minibatches = [part for part in planned if any(given.mean_weights_T.any() for given in part)]
    totals: dict[str, list[float]] = {}
    first: Mapping[str, float] = {}
    factor = _rate_factor(config, selection, step)
    updates = learner.step(minibatches, lr_factor=factor) if minibatches else ()
    for minibatch, stats in zip(minibatches, updates, strict=True):
        if not np.isfinite(list(stats.values())).all():
            raise NotFiniteError(stats, minibatch)
        # Before the first update the policy is still the one that the sampler used.
        first = first or stats
        for name, value in stats.items():
            totals.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in totals.items()}
    return {
        "update/num_skipped": float(len(planned) - len(minibatches)),
        **{f"learner/{name}": mean for name, mean in means.items() if name not in MISMATCH},
        **{f"mismatch/{name}": first[name] for name in MISMATCH if name in first},
    }


def _rate_factor(config: Config, selection: Selection, step: int) -> float:
    """Factor on the learning rates: the schedule's, and the filter's by kept fraction.

    The latter scales the rate because AdamW cancels any factor on the loss. Groups drawn to refill
    a batch do not make it larger.
    """
    options = config.optimizer
    factor = lr_factor(
        step,
        config.num_steps,
        schedule=options.schedule,
        warmup_steps=options.warmup_steps,
        min_ratio=options.min_lr_ratio,
    )
    batch = max(min(selection.num_groups, config.rollout.num_groups), 1)
    kept_share = min(len(selection.kept) / batch, 1.0)
    return factor * loss_scale(kept_share, config.filter.loss_scale)


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


def _minibatches(
    config: Config,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    step: int,
) -> list[list[LossSample]]:
    """The trajectories of a step, dealt out at random among the updates of every epoch.

    The samples of a trajectory stay together, so that it is one row of the update's means.
    """
    options, rng = config.optimizer, np.random.default_rng([config.seed, step])
    longest = config.rollout.max_response_tokens
    rows = by_trajectory(samples)
    minibatches = []
    for _ in range(options.num_epochs if samples else 0):
        order = rng.permutation(len(rows))
        for part in np.array_split(order, min(options.num_minibatches, len(rows))):
            chosen = [index for row in part for index in rows[row]]
            own = [samples[index] for index in chosen]
            weights = token_weights(own, algorithm.aggregation, max_length=longest)
            means = token_weights(own, "token_mean", max_length=longest)
            found = [advantages[index] for index in chosen]
            minibatches.append(loss_samples(own, found, weights, means))
    return minibatches


def loss_samples(
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    weights: Sequence[np.ndarray],
    mean_weights: Sequence[np.ndarray],
) -> list[LossSample]:
    """A minibatch as `Learner.step` takes it; importance weighs the policy loss alone."""
    return [
        LossSample(
            sample=s,
            advantages_T=found.advantages_T,
            weights_T=weights_T if s.importance_T is None else weights_T * s.importance_T,
            mean_weights_T=mean_weights_T,
            returns_T=found.returns_T,
            old_values_T=found.old_values_T,
        )
        for s, found, weights_T, mean_weights_T in zip(
            samples, advantages, weights, mean_weights, strict=True
        )
    ]
