"""What single groups and single terms of the loss would do to the policy, by reward variance.

The gradients of one update on all groups: no filter, one minibatch, no clipping of the norm. Reward
variance (RV) is of the rewards that advantages are made of, so a group of RV 0 has no task gradient
under a group baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from moored.algo import reward_variance
from moored.algo.gradients import decompose
from moored.config import Config, FilterConfig, GradientsConfig
from moored.engine.base import GradientLearner, Learner
from moored.errors import MooredError
from moored.training.algorithms import Algorithm
from moored.training.samples import (
    LossSample,
    score_groups,
    select_samples,
    shaped_rewards,
    token_weights,
)
from moored.training.update import estimate_advantages, loss_samples, with_old_logprobs
from moored.types import Group


def check_measures_gradients(learner: object) -> None:
    """Refuse a learner that cannot tell gradients apart, before anything is rolled out."""
    if not isinstance(learner, GradientLearner):
        raise MooredError(
            f"the learner of this engine, {type(learner).__name__}, cannot measure gradients; use "
            f"engine.kind=local, or give it the method of moored.engine.base.GradientLearner"
        )


def measure_gradients(
    config: Config,
    algorithm: Algorithm,
    learner: Learner,
    groups: Sequence[Group],
    options: GradientsConfig,
) -> dict[str, object]:
    """A record of `gradients.jsonl`: figures of each RV bucket and of all groups.

    A group whose episodes all ended in errors has no gradient, and is left out.
    """
    assert isinstance(learner, GradientLearner)
    parts = update_by_group(config, algorithm, learner, groups)
    if any(parts):
        groups = [group for group, part in zip(groups, parts, strict=True) if part]
        parts = [part for part in parts if part]
    found = learner.term_gradients(parts, params=options.params)
    figures = decompose(
        found.products_TPTP,
        found.terms,
        rv=reward_variance([shaped_rewards(config, group) for group in groups]).variances,
        num_tokens=[sum(given.sample.num_loss_tokens for given in part) for part in parts],
        num_samples=[len({given.sample.trajectory for given in part}) for part in parts],
        num_buckets=min(options.num_buckets, len(groups)),
    )
    projection = None
    if found.dimensions is not None:
        error = projection_error(found.dimensions)
        projection = {"dimensions": found.dimensions, "relative_error": error}
    return {
        "algorithm": config.algorithm.name,
        "params": options.params,
        "num_parameters": found.num_parameters,
        "num_groups": len(groups),
        "group_size": max(len(group.trajectories) for group in groups),
        "projection": projection,
        **asdict(figures),
    }


def projection_error(dimensions: int) -> float:
    """Relative error that 99.7 % of projected norms stay below: three standard deviations.

    A projected square has a relative variance of 2 / dimensions at most, its root half the spread.
    """
    return 3.0 * math.sqrt(2.0 / dimensions) / 2.0


def update_by_group(
    config: Config, algorithm: Algorithm, learner: Learner, groups: Sequence[Group]
) -> list[list[LossSample]]:
    """One update on all groups, cut by group; weights and whitening are of the whole update."""
    config = config.model_copy(update={"filter": FilterConfig(rule="none")})
    selection = score_groups(config.filter, groups)
    samples = select_samples(config, groups, selection)
    samples, _ = with_old_logprobs(config.algorithm, learner, samples)
    advantages = estimate_advantages(config, algorithm, learner, groups, samples)
    longest = config.rollout.max_response_tokens
    weights = token_weights(samples, algorithm.aggregation, max_length=longest)
    means = token_weights(samples, "token_mean", max_length=longest)
    parts: list[list[LossSample]] = [[] for _ in groups]
    for given in loss_samples(samples, advantages, weights, means):
        parts[given.sample.group].append(given)
    return parts
