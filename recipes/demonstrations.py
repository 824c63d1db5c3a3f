"""Demonstration dialogues: the environments' own text, answered from their oracles.

Three kinds of reply, one kind per dialogue: *grounded* states facts of the observation and then
gives the oracle's plan; *noised* states the same facts, but some moves are replaced by random
ones; *boilerplate* is stock phrases followed by a poor plan. Seeded: `make_dialogue(seed, i)` is
the same text everywhere. Only task seeds of the train split are used.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from moored.envs import Environment, format_reply
from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import make_env
from moored.types import Message
from recipes.boilerplate import write_boilerplate
from recipes.facts import TEACHERS, Moment, Teacher

Kind = Literal["grounded", "noised", "boilerplate"]
ONE_TURN: Mapping[str, object] = {"max_turns": 1, "max_actions_per_turn": 10}


@dataclass(frozen=True, slots=True)
class TraceMix:
    """Which replies a task is demonstrated with. The default leaves much to learn."""

    grounded: float = 0.3
    """Share of dialogues that state facts; the others are boilerplate with poor plans."""
    noised: float = 0.9
    """Share of the grounded dialogues whose plans are noised."""
    noise: float = 0.3
    """Chance that a move of a noised plan is replaced by a random one."""

    @property
    def shares(self) -> dict[Kind, float]:
        """Share of each kind of dialogue."""
        noised = self.grounded * self.noised
        return {
            "grounded": self.grounded - noised,
            "noised": noised,
            "boilerplate": 1 - self.grounded,
        }


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One entry of the demonstration mix."""

    env: str
    weight: float
    options: Mapping[str, object] = field(default_factory=dict)
    traces: TraceMix = TraceMix()


REASONED = TraceMix(grounded=0.6, noised=0.3)
"""For tasks that guessing does not solve."""
UNSURE = TraceMix(grounded=0.5, noised=0.4)
"""For a choice of two, where a noised answer is the wrong one."""

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
    return play(_environment(spec.env, tuple(spec.options.items())), spec, rng)


def play(env: Environment, spec: TaskSpec, rng: random.Random) -> Dialogue:
    """Play one train episode as a teacher of a drawn kind would."""
    teacher = TEACHERS[spec.env]
    kinds = spec.traces.shares
    kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
    task_seed = _draw_seed(teacher, rng)
    messages = env.reset(task_seed, episode_seed=rng.getrandbits(31))
    while True:
        moment = Moment(
            task_seed=task_seed,
            system=messages[0].text,
            first=messages[1].text,
            observation=messages[-1].text,
            answer=env.oracle(),
        )
        reply = write_reply(teacher, moment, kind, spec.traces.noise, rng)
        messages.append(Message("assistant", reply))
        result = env.step(reply)
        if result.is_over:
            return Dialogue(spec, task_seed, kind, tuple(messages))
        messages.append(Message("user", result.observation))


def write_reply(
    teacher: Teacher, moment: Moment, kind: Kind, noise: float, rng: random.Random
) -> str:
    """One reply; where no good answer is left, a grounded one states the facts and guesses."""
    if kind == "boilerplate":
        return format_reply(write_boilerplate(rng), teacher.guess(moment, rng))
    if not moment.answer:
        answer = teacher.guess(moment, rng)
    else:
        moment = _with_answer(moment, teacher.tidy(moment))
        answer = teacher.noise(moment, noise, rng) if kind == "noised" else moment.answer
    return format_reply(teacher.facts(_with_answer(moment, answer), rng), answer)


def _with_answer(moment: Moment, answer: str) -> Moment:
    return dataclasses.replace(moment, answer=answer)


def _draw_seed(teacher: Teacher, rng: random.Random) -> int:
    while True:
        task_seed = rng.choice(SPLIT_SEEDS["train"])
        if teacher.suits(task_seed):
            return task_seed


@lru_cache(maxsize=64)
def _environment(env: str, options: tuple[tuple[str, object], ...]) -> Environment:
    """Environments are reused: making one costs more than an episode."""
    return make_env(env, **dict(options))
