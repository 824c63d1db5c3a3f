"""Demonstrations of the embedded models: `moored.sft.demonstrations` over a fixed mix of tasks.

Seeded: `make_dialogue(seed, i)` is the same text everywhere. Only task seeds of the train split
are used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from moored.envs import Environment
from moored.envs.base import SPLIT_SEEDS, draw_task
from moored.envs.frozen_lake import FrozenLake
from moored.envs.math.word_problems import Problem, make_problem
from moored.envs.mix import make_env
from moored.sft.demonstrations import Kind, TraceMix, play
from moored.types import Message

ONE_TURN: Mapping[str, object] = {"max_turns": 1, "max_actions_per_turn": 10}
WORD_PROBLEM_LEVELS = (1, 1)

HARD_START = TraceMix(grounded=0.3, noised=0.9)
"""The default, which leaves much to learn."""
REASONED = TraceMix(grounded=0.6, noised=0.3)
"""For tasks that guessing does not solve."""
UNSURE = TraceMix(grounded=0.5, noised=0.4)
"""For a choice of two, where a noised answer is the wrong one."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One entry of the demonstration mix."""

    env: str
    weight: float
    options: Mapping[str, object] = field(default_factory=dict)
    traces: TraceMix = HARD_START


MIX: tuple[TaskSpec, ...] = (
    TaskSpec("sokoban", 30, ONE_TURN),
    TaskSpec("sokoban", 12),
    TaskSpec("sokoban", 2, {"view": "grid", **ONE_TURN}),
    TaskSpec("sokoban", 2, {"view": "coord", **ONE_TURN}),
    TaskSpec("sokoban", 2, {"rows": 5, "cols": 7, "max_turns": 3, "max_actions_per_turn": 3}),
    TaskSpec("sokoban", 2, {"rows": 7, "cols": 7, "boxes": 2, "format_penalty": -0.5}),
    TaskSpec("frozen_lake", 8, ONE_TURN),
    TaskSpec("frozen_lake", 4, {"slip": 0.0, **ONE_TURN}),
    TaskSpec("frozen_lake", 4),
    TaskSpec("frozen_lake", 2, {"slip": 0.0}),
    TaskSpec("frozen_lake", 2, {"slip": 0.1, "view": "grid_coord", "format_penalty": -0.5}),
    TaskSpec("countdown", 9, traces=REASONED),
    TaskSpec("countdown", 3, {"num_numbers": 3, "format_penalty": -0.5}, REASONED),
    TaskSpec("bandit", 4, traces=UNSURE),
    TaskSpec("bandit", 2, {"format_penalty": -0.5, "safe_reward": 0.2}, UNSURE),
    TaskSpec("metamath", 8, {"level": 1, "max_turns": 1}, REASONED),
    TaskSpec("metamath", 3, {"level": 1}, REASONED),
    TaskSpec("metamath", 1, {"level": 1, "max_turns": 2, "format_penalty": -0.5}, REASONED),
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One demonstrated episode, ending with a reply."""

    spec: TaskSpec
    task_seed: int
    kind: Kind
    messages: tuple[Message, ...]


def make_dialogue(seed: int, index: int, mix: tuple[TaskSpec, ...] = MIX) -> Dialogue:
    """The `index`-th dialogue of a seed, a function of its arguments alone."""
    rng = random.Random(f"demonstration {seed} {index}")
    spec = rng.choices(mix, weights=[spec.weight for spec in mix])[0]
    env = _environment(spec.env, tuple(spec.options.items()))
    kind = spec.traces.draw(rng)
    task_seed = _draw_seed(spec.env, rng)
    episode = play(env, task_seed, rng, kind=kind, noise=spec.traces.noise, answer_of=short_answer)
    return Dialogue(spec, task_seed, kind, episode.messages)


def short_answer(env: Environment) -> str:
    """The oracle's answer; on a lake cut where it reaches the goal if nothing slips."""
    answer = env.oracle()
    if not answer or not isinstance(env, FrozenLake):
        return answer
    actions = answer.split(" || ")
    return " || ".join(actions[: env.actions_to_goal(actions)])


def _draw_seed(env: str, rng: random.Random) -> int:
    """A train task; word problems of at most two steps, which a small model can work out."""
    while True:
        task_seed = rng.choice(SPLIT_SEEDS["train"])
        if env != "metamath" or word_problem(task_seed).solution.count("\n") <= 2:
            return task_seed


def word_problem(task_seed: int) -> Problem:
    """The problem `MetaMath(level=1)` poses for this seed, with its worked solution."""
    return draw_task(
        task_seed,
        make=lambda rng: make_problem(rng, WORD_PROBLEM_LEVELS),
        key=lambda problem: problem.question,
    )[0]


@lru_cache(maxsize=64)
def _environment(env: str, options: tuple[tuple[str, object], ...]) -> Environment:
    """Environments are reused: making one costs more than an episode."""
    return make_env(env, **dict(options))
