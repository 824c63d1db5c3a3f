"""Sokoban whose calls take processor time, as those of sandboxes and searches do."""

from __future__ import annotations

import time
from typing import ClassVar

from moored.envs.base import StepResult
from moored.envs.sokoban.env import Sokoban
from moored.types import Message


class Burning(Sokoban):
    """`burn_ms`: processor time of a call, besides its own."""

    name: ClassVar[str] = "burning"
    burn_ms: float = 2.0

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._burn()
        return super().reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        self._burn()
        return super().step(reply)

    def _burn(self) -> None:
        end_s = time.thread_time() + self.burn_ms / 1000.0
        while time.thread_time() < end_s:
            pass
