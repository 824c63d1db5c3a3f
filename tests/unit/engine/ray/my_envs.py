"""Environments of a user's own folder, which actors find by `my_envs:Walk`."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moored.envs import Resource, StepResult
from moored.types import Message


class Walk:
    """Three to six turns of seeded noise; a reply may name something odd to do."""

    name: ClassVar[str] = "walk"
    is_stochastic: ClassVar[bool] = True
    max_turns: int = 8

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        time.sleep(self.pause_s)
        self._rng = random.Random(f"{task_seed}.{episode_seed}")
        self._left = 3 + task_seed % 4
        return [Message("user", f"Task {task_seed}")]

    def step(self, reply: str) -> StepResult:
        time.sleep(self.pause_s)
        if "hang" in reply:
            threading.Event().wait()
        if "die" in reply:
            os._exit(3)
        if "lock" in reply:
            # Exponential backtracking, in C: no other thread runs meanwhile.
            re.match("(a+)+$", "a" * 60 + "b")
        if "raise" in reply:
            raise OddError(1, 2)
        self._left -= 1
        seen = f"{self._rng.random():.6f} after {len(reply)} characters"
        return StepResult(observation=seen, reward=self._rng.random(), terminated=not self._left)

    def oracle(self) -> str:
        return "on"

    def close(self) -> None:
        pass


class OddError(Exception):
    """Cannot be read from its pickle: that has one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class DiesAtReset(Walk):
    """Ends its process when it begins."""

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        os._exit(3)


class Busy(Walk):
    """Cannot be made while there is a file of this name, which it removes."""

    def __init__(self) -> None:
        super().__init__()
        if Path("busy").exists():
            Path("busy").unlink()
            raise OSError("port 1234 is taken")


@dataclass
class Book(Resource):
    """Notes in a file which process opens and closes it."""

    path: str

    def open(self) -> None:
        self._note("open")

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{what} {os.getpid()}\n")


class Reader(Walk):
    """Its book is named relative to the folder that the run was started in."""

    book: Book

    def __init__(self, path: str = "book.txt") -> None:
        super().__init__()
        self.path = path

    def resources(self) -> dict[str, Resource]:
        return {"book": Book(self.path)}
