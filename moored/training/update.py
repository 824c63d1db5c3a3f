"""From recorded groups to an updated policy: selection, advantages, minibatches, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moored.algo import loss_scale, lr_factor, reward_variance, select_groups, select_trajectories
from moored.algo.groups import Quantity, load_score
from moored.config import AlgorithmConfig, Config, FilterConfig
from moored.engine.base import Learner
from moored.errors import MooredError
from moored.names import Aggregation, FilterReward
from moored.training.advantages import (
    CriticEstimator,
    TokenAdvantages,
    critic_advantages,
    group_advantages,
)
from moored.training.algorithms import Algorithm
from moored.training.batch import LossSample, Sample, build_samples, token_weights
from moored.types import Group, ScoreRequest, Selection, Trajectory

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


def score_groups(options: FilterConfig, groups: Sequence[Group]) -> Selection:
    """Score and select groups."""
    quantity = load_score(options.score).quantity
    return select_groups(
        np.concatenate([_scored(options, group, quantity) for group in groups]),
        _group_ids(groups),
        score=options.score,
        ddof=options.ddof,
        rule=options.rule,
        value=options.value,
        eps=options.eps,
        largest=options.largest,
        keep_zero=options.keep_zero,
    )


def _scored(options: FilterConfig, group: Group, quantity: Quantity) -> np.ndarray:
    """(G,) what the score is taken of; NaN, and so left out, after an error."""
    if quantity == "reward":
        return filter_rewards(group, options.reward)
    return np.array([_of_tokens(trajectory, quantity) for trajectory in group.trajectories])


def filter_rewards(group: Group, kind: FilterReward) -> np.ndarray:
    """(G,) the rewards by which the filter tells the trajectories of a group apart.

    `task` leaves out penalties. A malformed reply also escapes what a failed one costs, e.g. the
    price of each move: a failure with malformed replies therefore counts at most as much as the
    worst trajectory without any, and does not make a group of failures look informative.
    """
    if kind == "total":
        return group.rewards
    rewards = np.array([t.task_reward for t in group.trajectories])
    is_valid = np.array([t.is_valid for t in group.trajectories]) & np.isfinite(rewards)
    if not is_valid.any():
        return rewards
    is_malformed = ~is_valid & ~np.array([t.success for t in group.trajectories])
    return np.where(is_malformed, np.minimum(rewards, rewards[is_valid].min()), rewards)


def _of_tokens(trajectory: Trajectory, quantity: Quantity) -> float:
    if trajectory.stop.is_error:
        return np.nan
    logprobs = np.concatenate([turn.logprobs for turn in trajectory.turns] or [np.zeros(0)])
    if quantity == "length":
        return float(len(logprobs))
    # The mean surprise of sampled tokens estimates the mean entropy they were drawn with.
    return float(-logprobs.mean()) if len(logprobs) else np.nan


def select_samples(
    options: FilterConfig, groups: Sequence[Group], selection: Selection
) -> list[Sample]:
    """Samples of the groups and trajectories that are trained on."""
    if not len(selection.kept):
        return []
    keeps_all = options.action in ("mask", "soft")
    samples = build_samples(groups, None if keeps_all else selection.group_mask)
    if options.best_and_worst:
        rewards = np.concatenate([filter_rewards(group, options.reward) for group in groups])
        count = options.best_and_worst
        is_chosen = select_trajectories(rewards, _group_ids(groups), best=count, worst=count)
        samples = [s for s in samples if is_chosen[s.trajectory]]
    return samples


def with_old_logprobs(
    options: AlgorithmConfig, learner: Learner, samples: list[Sample]
) -> tuple[list[Sample], dict[str, float]]:
    """Samples with the log-probabilities that ratios start from, and how far engines are apart.

    `old_logprobs: sampler` leaves samples as they are; `update` then measures the gap.
    """
    if options.old_logprobs == "sampler" or not samples:
        return samples, {}
    scored = learner.score([ScoreRequest(s.prompt, [s.ids_T]) for s in samples])
    gaps = [
        logp[sample.loss_mask_T] - sample.old_logprobs_T[sample.loss_mask_T]
        for sample, (logp,) in zip(samples, scored, strict=True)
    ]
    rescored = [
        replace(sample, old_logprobs_T=np.where(sample.loss_mask_T, logp, 0.0))
        for sample, (logp,) in zip(samples, scored, strict=True)
    ]
    return rescored, _mismatch(np.concatenate(gaps))


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
    if isinstance(algorithm.advantage, CriticEstimator):
        values = learner.values(samples)
        return critic_advantages(samples, values, algorithm.advantage, config.algorithm)
    rewards = np.concatenate([_shaped_rewards(config, group) for group in groups])
    return group_advantages(samples, rewards, _group_ids(groups), algorithm.advantage)


def _group_ids(groups: Sequence[Group]) -> np.ndarray:
    """Index of the group of each trajectory."""
    return np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])


def _shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """Rewards less the penalty for overlong replies."""
    longest, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    penalties = [
        sum(overlong_penalty(len(turn.completion_ids), longest, buffer) for turn in t.turns)
        for t in group.trajectories
    ]
    return group.rewards + np.array(penalties)


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to max - buffer, then linearly down to -1 at max."""
    if buffer <= 0:
        return 0.0
    return float(np.clip((max_length - buffer - length) / buffer, -1.0, 0.0))


def update(
    config: Config,
    algorithm: Algorithm,
    learner: Learner,
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    selection: Selection,
    step: int,
) -> dict[str, float]:
    """Minibatch updates; their number does not depend on what the filter kept."""
    options = config.optimizer
    factor = lr_factor(
        step,
        config.num_steps,
        schedule=options.schedule,
        warmup_steps=options.warmup_steps,
        min_ratio=options.min_lr_ratio,
    )
    minibatches = _minibatches(config, algorithm, samples, advantages, selection, step)
    totals: dict[str, list[float]] = {}
    first: Mapping[str, float] = {}
    updates = learner.step(minibatches, lr_factor=factor) if minibatches else ()
    for minibatch, stats in zip(minibatches, updates, strict=True):
        if not np.isfinite(list(stats.values())).all():
            raise NotFiniteError(stats, minibatch)
        # Before the first update the policy is still the one that the sampler used.
        first = first or stats
        for name, value in stats.items():
            totals.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in totals.items()}
    learnt = {f"learner/{name}": mean for name, mean in means.items() if name not in MISMATCH}
    return learnt | {f"mismatch/{name}": first[name] for name in MISMATCH if name in first}


def _minibatches(
    config: Config,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    selection: Selection,
    step: int,
) -> list[list[LossSample]]:
    """The samples of a step, dealt out at random among the updates of every epoch."""
    options, rng = config.optimizer, np.random.default_rng([config.seed, step])
    minibatches = []
    for _ in range(options.num_epochs if samples else 0):
        order = rng.permutation(len(samples))
        for part in np.array_split(order, min(options.num_minibatches, len(samples))):
            own = [samples[i] for i in part]
            weights = _weights(config, algorithm.aggregation, own, selection)
            means = _weights(config, "token_mean", own, selection)
            minibatches.append(loss_samples(own, [advantages[i] for i in part], weights, means))
    return minibatches


def loss_samples(
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    weights: Sequence[np.ndarray],
    mean_weights: Sequence[np.ndarray],
) -> list[LossSample]:
    """A minibatch as `Learner.step` takes it."""
    return [
        LossSample(
            sample=sample,
            advantages_T=found.advantages_T,
            weights_T=weights_T,
            mean_weights_T=mean_weights_T,
            returns_T=found.returns_T,
            old_values_T=found.old_values_T,
        )
        for sample, found, weights_T, mean_weights_T in zip(
            samples, advantages, weights, mean_weights, strict=True
        )
    ]


def _weights(
    config: Config, how: Aggregation, samples: Sequence[Sample], selection: Selection
) -> list[np.ndarray]:
    """Token weights of one update: aggregation, loss scale, the filter's soft or mask action."""
    action, mask = config.filter.action, selection.group_mask
    counted = [i for i, s in enumerate(samples) if action != "mask" or mask[s.group]]
    found = token_weights(
        [samples[i] for i in counted],
        how,
        max_length=config.rollout.max_response_tokens,
        scale=loss_scale(selection.kept_fraction, config.filter.loss_scale),
    )
    weights = [np.zeros(len(sample.ids_T)) for sample in samples]
    for i, weights_T in zip(counted, found, strict=True):
        weights[i] = weights_T
    if action != "soft":
        return weights
    group_weights = selection.weights
    return [w * group_weights[s.group] for w, s in zip(weights, samples, strict=True)]


def step_metrics(
    options: FilterConfig,
    groups: Sequence[Group],
    selection: Selection,
    samples: Sequence[Sample],
    stats: Mapping[str, float],
) -> dict[str, float]:
    """The numbers of one step; reward variance is of the rewards that the filter scores."""
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    generated = sum(len(turn.completion_ids) for turn in turns)
    trained = sum(sample.num_loss_tokens for sample in samples)
    rewards = np.array([t.reward for t in trajectories])
    rv = reward_variance([filter_rewards(group, options.reward) for group in groups])
    return {
        "rollout/reward_mean": float(np.nanmean(rewards)) if np.isfinite(rewards).any() else np.nan,
        "rollout/success_rate": float(np.mean([t.success for t in trajectories])),
        "rollout/validity_rate": float(np.mean([turn.is_valid for turn in turns] or [0.0])),
        "rollout/turns_mean": len(turns) / len(trajectories),
        "rollout/reply_tokens_mean": generated / max(len(turns), 1),
        "rollout/error_count": float(sum(t.stop.is_error for t in trajectories)),
        "rollout/truncated_count": float(sum(t.stop.is_truncation for t in trajectories)),
        "rollout/reward_variance_mean": rv.mean,
        "rollout/reward_variance_std_over_mean": rv.std_over_mean,
        "tokens/generated": float(generated),
        "tokens/trained": float(trained),
        "tokens/discarded": float(generated - trained),
        "update/is_empty": float(not samples),
        **selection.metrics(),
        **stats,
    }
