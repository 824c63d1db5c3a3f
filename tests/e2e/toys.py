"""Tasks so small that a random model of nine words learns them in seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import torch

from moored.config import Config, load_config
from moored.engine.local.learner import LocalLearner
from moored.envs.base import StepResult
from moored.train import Run, StepRecord, start, train
from moored.types import Message

HERE = "tests.e2e.toys"


class Echo:
    """Two states, two letters: answer with the letter that is shown. Tags are not asked for."""

    name: ClassVar[str] = "echo"
    is_stochastic: ClassVar[bool] = False
    max_turns: int = 1

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._letter = "AB"[random.Random(task_seed).randrange(2)]
        return [Message("user", self._letter)]

    def step(self, reply: str) -> StepResult:
        is_right = reply.startswith(self._letter)
        return StepResult(observation="", reward=float(is_right), terminated=True, success=is_right)

    def oracle(self) -> str:
        return self._letter

    def close(self) -> None:
        pass


class Half(Echo):
    """Echo that pays only for odd tasks: half of its groups have no variance."""

    name: ClassVar[str] = "half"

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._pays = task_seed % 2
        return super().reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        result = super().step(reply)
        return StepResult(observation="", reward=self._pays * result.reward, terminated=True)


class Priced(Echo):
    """Echo that can be solved in every fourth task; in the others one letter costs a little."""

    name: ClassVar[str] = "priced"

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._is_open = task_seed % 4 == 0
        return super().reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        if self._is_open:
            return super().step(reply)
        return StepResult(observation="", reward=-0.1 * reply.startswith("B"), terminated=True)


class Late(Echo):
    """Echo of three turns: the first answer counts, and is paid for after the third."""

    name: ClassVar[str] = "late"
    max_turns: int = 3

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._turn = 0
        return super().reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        self._turn += 1
        if self._turn == 1:
            self._was_right = reply.startswith(self._letter)
        if self._turn < 3:
            return StepResult(observation="CD"[self._turn - 1], reward=0.0, terminated=False)
        earned = float(self._was_right)
        return StepResult(observation="", reward=earned, terminated=True, success=self._was_right)


class Logged(Echo):
    """Echo that notes its tasks in the order they are played."""

    name: ClassVar[str] = "logged"
    played: ClassVar[list[tuple[str, int]]] = []

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        Logged.played.append((self.name, task_seed))
        return super().reset(task_seed, episode_seed)


class AlsoLogged(Logged):
    name: ClassVar[str] = "also_logged"


def toy_config(folder: Path, *overrides: str) -> Config:
    return load_config(
        {"env": f"{HERE}:Echo", "model": str(folder)},
        [
            "num_steps=40",
            "optimizer.lr=3e-3",
            "optimizer.critic_lr=1e-2",
            "optimizer.num_minibatches=2",
            "rollout.max_response_tokens=2",
            "collapse.every=0",
            "stop.low_variance=0",
            "filter.max_empty_steps=1000",
            "algorithm.entropy_coef=0",
            *overrides,
        ],
    )


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """The policy's weights by name; of a run in this process."""
    assert isinstance(run.engine.learner, LocalLearner)
    return dict(run.engine.learner.model.state_dict())


def success_rates(run: Run) -> list[float]:
    """Of every step of a whole run."""
    rates: list[float] = []
    start(run)
    train(run, lambda record: rates.append(record.metrics["rollout/success_rate"]))
    return rates


def rates_until_solved(run: Run) -> list[float]:
    """Success rates up to where the last five are above 0.9 on average, or of the whole run."""
    rates: list[float] = []

    def is_solved(record: StepRecord) -> bool:
        rates.append(record.metrics["rollout/success_rate"])
        return sum(rates[-5:]) > 5 * 0.9

    start(run)
    train(run, is_solved)
    return rates
