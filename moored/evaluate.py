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
from moored.rollout.episodes import Task, Writer, roll_out
from moored.rollout.pool import EnvCalls
from moored.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Success on `num_tasks` tasks, `num_samples` episodes each.

    An episode that ended in an error says nothing about the policy: it is neither a success nor a
    failure, but one of `num_errors`, and figures are NaN when all episodes did.
    """

    model: str
    temperature: float
    split: str
    task_seeds: tuple[int, int]
    """The first and the last."""
    seed: int
    """Of the replies, and of the order of environments in a mix."""
    num_tasks: int
    num_samples: int
    success_rate: float
    """Over the episodes that did not end in an error."""
    interval: tuple[float, float]
    """95 % Wilson interval of the success rate over episodes (tasks when there are several)."""
    pass_at: dict[int, float]
    """k -> chance that at least one of k episodes of a task succeeds (unbiased), over the tasks of
    which k did not end in an error."""
    reward_mean: float
    """Over the same episodes as success."""
    validity_rate: float
    """Share of turns with a well-formed reply."""
    mean_turns: float
    mean_reply_tokens: float | None
    """None when an endpoint does not count them."""
    num_errors: int
    """Episodes that ended in an error: of the environment, the sampler, or by a time limit."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the run log."""
        return {
            "evaluation/success_rate": self.success_rate,
            "evaluation/reward_mean": self.reward_mean,
            "evaluation/validity_rate": self.validity_rate,
            "evaluation/error_count": float(self.num_errors),
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
    return summarize(groups, config)


def summarize(groups: Sequence[Group], config: Config) -> Evaluation:
    """Rates over the episodes that did not end in an error."""
    num_samples = config.evaluation.num_samples
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    wins = [[t.success for t in group.trajectories if not t.stop.is_error] for group in groups]
    whole = [t for t in trajectories if not t.stop.is_error]
    success_rate = float(np.mean([t.success for t in whole] or [math.nan]))
    # Episodes of one task are not independent: with several, the task is the unit.
    trials = len(whole) if num_samples == 1 else sum(map(bool, wins))
    return Evaluation(
        model=config.model,
        temperature=config.evaluation.temperature,
        split=config.evaluation.split,
        task_seeds=(groups[0].task_seed, groups[-1].task_seed),
        seed=config.seed,
        num_tasks=len(groups),
        num_samples=num_samples,
        success_rate=success_rate,
        interval=wilson_interval(success_rate * trials, trials) if trials else (math.nan, math.nan),
        pass_at=_pass_at(wins),
        reward_mean=float(np.mean([t.reward for t in whole] or [math.nan])),
        validity_rate=float(np.mean([turn.is_valid for turn in turns])) if turns else 0.0,
        mean_turns=len(turns) / max(len(trajectories), 1),
        mean_reply_tokens=float(np.mean([len(t.completion_ids) for t in turns])) if turns else 0.0,
        num_errors=len(trajectories) - len(whole),
    )


def _pass_at(wins: Sequence[Sequence[bool]]) -> dict[int, float]:
    """For k up to the most episodes of a task."""
    found = {}
    for k in (1, 2, 4, 8, 16, 32, 64):
        rates = [pass_at_k(len(each), sum(each), k) for each in wins if len(each) >= k]
        if rates:
            found[k] = float(np.mean(rates))
    return found


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): chance that k draws without replacement hit a success."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
