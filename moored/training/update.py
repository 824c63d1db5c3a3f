"""From recorded groups to an updated policy: selection, advantages, token weights, minibatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moored.algo import loss_scale, lr_factor, select_groups, select_trajectories
from moored.config import Config, FilterConfig
from moored.engine.base import Learner
from moored.errors import MooredError
from moored.names import Score
from moored.training.algorithms import (
    Algorithm,
    overlong_penalty,
    set_gae_advantages,
    set_group_advantages,
)
from moored.training.batch import Sample, build_samples, set_weights
from moored.types import Group, Selection, Trajectory


class NotFiniteError(MooredError):
    """An update that was not made because its numbers are not finite, and what it was made of."""

    def __init__(self, stats: Mapping[str, float], samples: Sequence[Sample]) -> None:
        self.stats = stats
        self.samples = samples
        bad = [name for name, value in stats.items() if not np.isfinite(value)]
        super().__init__(
            f"{', '.join(bad)} of an update is not finite, so the update was not made; lower "
            f"optimizer.lr or optimizer.grad_clip and resume"
        )


def score_groups(options: FilterConfig, groups: Sequence[Group]) -> Selection:
    """Score and select groups."""
    return select_groups(
        [_scored(t, options.score) for group in groups for t in group.trajectories],
        np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups]),
        score=options.score,
        ddof=options.ddof,
        rule=options.rule,
        value=options.value,
        eps=options.eps,
        largest=options.largest,
        keep_zero=options.keep_zero,
    )


def _scored(trajectory: Trajectory, score: Score) -> float:
    """What the score is taken of; NaN, and so left out, after an error."""
    if trajectory.stop.is_error or score in ("variance", "std", "reward_mean"):
        return trajectory.reward
    logprobs = np.concatenate([turn.logprobs for turn in trajectory.turns] or [np.zeros(0)])
    if score == "length":
        return float(len(logprobs))
    # The mean surprise of sampled tokens estimates the mean entropy they were drawn with.
    return float(-logprobs.mean()) if len(logprobs) else np.nan


def make_samples(
    config: Config,
    algorithm: Algorithm,
    learner: Learner,
    groups: Sequence[Group],
    selection: Selection,
) -> list[Sample]:
    """Samples of the groups that are trained on, with their advantages."""
    keeps_all = config.filter.action in ("mask", "soft")
    samples = build_samples(groups)
    ids = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    if not keeps_all:
        samples = [s for s in samples if selection.group_mask[s.group]]
    if config.filter.best_and_worst:
        rewards = np.concatenate([group.rewards for group in groups])
        count = config.filter.best_and_worst
        is_chosen = select_trajectories(rewards, ids, best=count, worst=count)
        samples = [s for s in samples if is_chosen[s.trajectory]]
    if not samples or not len(selection.kept):
        return []
    if algorithm.group_advantage is None:
        set_gae_advantages(samples, learner.values(samples), config.algorithm)
        return samples
    rewards = np.concatenate([_shaped_rewards(config, group) for group in groups])
    set_group_advantages(samples, rewards, ids, algorithm.group_advantage)
    return samples


def _shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """Rewards less the penalty for overlong replies."""
    longest, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    penalties = [
        sum(overlong_penalty(len(turn.completion_ids), longest, buffer) for turn in t.turns)
        for t in group.trajectories
    ]
    return group.rewards + np.array(penalties)


def update(
    config: Config,
    algorithm: Algorithm,
    learner: Learner,
    samples: Sequence[Sample],
    selection: Selection,
    step: int,
) -> dict[str, float]:
    """Minibatch updates; the same number of them whatever the filter kept."""
    options = config.optimizer
    factor = lr_factor(
        step,
        config.num_steps,
        schedule=options.schedule,
        warmup_steps=options.warmup_steps,
        min_ratio=options.min_lr_ratio,
    )
    rng = np.random.default_rng([config.seed, step])
    totals: dict[str, list[float]] = {}
    for _ in range(options.num_epochs if samples else 0):
        order = rng.permutation(len(samples))
        for part in np.array_split(order, min(options.num_minibatches, len(samples))):
            minibatch = [samples[i] for i in part]
            _weigh(config, algorithm, minibatch, selection)
            stats = learner.step(minibatch, lr_factor=factor)
            if not np.isfinite(list(stats.values())).all():
                raise NotFiniteError(stats, minibatch)
            for name, value in stats.items():
                totals.setdefault(name, []).append(value)
    return {f"learner/{name}": float(np.mean(values)) for name, values in totals.items()}


def _weigh(
    config: Config, algorithm: Algorithm, minibatch: Sequence[Sample], selection: Selection
) -> None:
    """Token weights of one update: aggregation, loss scale, the filter's soft or mask action."""
    scale = loss_scale(selection.kept_fraction, config.filter.loss_scale)
    how = config.algorithm.aggregation or algorithm.aggregation
    masked = config.filter.action == "mask"
    counted = [s for s in minibatch if not masked or selection.group_mask[s.group]]
    set_weights(counted, how, max_length=config.rollout.max_response_tokens, scale=scale)
    for sample in minibatch:
        if masked and not selection.group_mask[sample.group]:
            sample.weights_T = np.zeros(len(sample.ids_T))
        if config.filter.action == "soft":
            sample.weights_T = sample.weights_T * selection.weights[sample.group]
