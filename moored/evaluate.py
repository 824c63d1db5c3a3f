"""How well a policy does on held-out tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moored.config import Config
from moored.diagnostics.resampling import wilson_interval
from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import EnvMix
from moored.rollout.calls import EnvCalls
from moored.rollout.episodes import Task, Writer, roll_out
from moored.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Success on `num_tasks` tasks, `num_samples` episodes each."""

    num_tasks: int
    num_samples: int
    success_rate: float
    interval: tuple[float, float]
    """95 % Wilson interval of the success rate over episodes (tasks when there are several)."""
    pass_at: dict[int, float]
    """k -> chance that at least one of k episodes of a task succeeds (unbiased)."""
    reward_mean: float
    """Over the episodes that did not end in an error; NaN when all did."""
    validity_rate: float
    """Share of turns with a well-formed reply."""
    mean_turns: float
    mean_reply_tokens: float | None
    """None when an endpoint does not count them."""
    num_errors: int
    """Episodes that ended in an error; they count as failures."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the run log."""
        return {
            "evaluation/success_rate": self.success_rate,
            "evaluation/reward_mean": self.reward_mean,
            "evaluation/validity_rate": self.validity_rate,
        }


def evaluate(
    engine: Writer,
    mix: EnvMix,
    config: Config,
    *,
    pool: EnvCalls[Any] | None = None,
    on_replies: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Play episodes of the first tasks of a split, as `evaluation` and `rollout` say."""
    options, first = config.evaluation, SPLIT_SEEDS[config.evaluation.split].start
    tasks = []
    for index in range(options.num_tasks):
        entry = mix.index_of_group(index, seed=config.seed)
        tasks.append(
            Task(
                group_id=index,
                env=mix.names[entry],
                make_env=mix.makers[entry],
                task_seed=first + index,
                episode_seeds=tuple(range(options.num_samples)),
            )
        )
    groups = roll_out(
        tasks,
        engine=engine,
        options=config.rollout,
        temperature=options.temperature,
        seed=(config.seed, 1),
        pool=pool,
        on_replies=on_replies,
    )
    return summarize(groups, options.num_samples)


def summarize(groups: Sequence[Group], num_samples: int) -> Evaluation:
    """Rates over all episodes; an episode that ended in an error did not succeed."""
    wins = np.array([[t.success for t in group.trajectories] for group in groups])
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    rewards = np.array([t.reward for t in trajectories])
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= num_samples]
    right = wins.sum(axis=1).tolist()
    # Episodes of one task are not independent: with several, the task is the unit.
    trials = wins.size if num_samples == 1 else len(groups)
    return Evaluation(
        num_tasks=len(groups),
        num_samples=num_samples,
        success_rate=float(wins.mean()),
        interval=wilson_interval(float(wins.mean()) * trials, trials),
        pass_at={k: float(np.mean([pass_at_k(num_samples, c, k) for c in right])) for k in ks},
        reward_mean=float(np.nanmean(rewards)) if np.isfinite(rewards).any() else math.nan,
        validity_rate=float(np.mean([turn.is_valid for turn in turns])) if turns else 0.0,
        mean_turns=len(turns) / max(len(trajectories), 1),
        mean_reply_tokens=float(np.mean([len(t.completion_ids) for t in turns])) if turns else 0.0,
        num_errors=sum(t.stop.is_error for t in trajectories),
    )


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): chance that k draws without replacement hit a success."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
