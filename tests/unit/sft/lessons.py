"""Environments for the tests of warm starts: small enough for a random model to learn at once."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from moored.envs.base import StepResult
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

LETTERS = "ABCD"


class Copy:
    """Answer with the letter that is shown; several turns show one each."""

    name: ClassVar[str] = "copy"
    is_stochastic: bool = False

    def __init__(self, *, max_turns: int = 1) -> None:
        self.max_turns = max_turns

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._rng, self._turn = random.Random(task_seed), 0
        return [Message("system", "Copy."), Message("user", self._show())]

    def step(self, reply: str) -> StepResult:
        answer = parse_reply(reply).answer
        self._turn += 1
        is_right, is_over = answer == self._letter, self._turn == self.max_turns
        return StepResult(
            observation="Over." if is_over else self._show(),
            reward=float(is_right),
            terminated=is_over,
            is_valid=answer in list(LETTERS),
            success=is_right,
        )

    def oracle(self) -> str:
        return self._letter

    def close(self) -> None:
        pass

    def _show(self) -> str:
        self._letter = self._rng.choice(LETTERS)
        return f"Letter {self._letter}."


class Taught(Copy):
    """Says what a good reasoning states, and how to guess."""

    name: ClassVar[str] = "taught"

    def reasoning(self, answer: str, rng: random.Random) -> str:
        return f"Letter {answer}."

    def guess(self, rng: random.Random) -> str:
        return rng.choice(LETTERS)


class Counting(Taught):
    """One of its methods returns a number instead of a text."""

    name: ClassVar[str] = "counting"

    def __init__(self, *, method: str) -> None:
        super().__init__()
        setattr(self, method, lambda *_: 7)


class Useless(Copy):
    """Its oracle answers what is never right, or never even valid."""

    name: ClassVar[str] = "useless"

    def __init__(self, *, answer: str = "") -> None:
        super().__init__()
        self._answer = answer

    def oracle(self) -> str:
        wrong = LETTERS[(LETTERS.index(self._letter) + 1) % len(LETTERS)]
        return self._answer or wrong


class Slow(Copy):
    """Takes its time, so that a run can be stopped in the middle."""

    name: ClassVar[str] = "slow"

    def oracle(self) -> str:
        time.sleep(0.03)
        return super().oracle()


class Mute(Copy):
    """Has no oracle."""

    name: ClassVar[str] = "mute"

    def oracle(self) -> str:
        raise EnvError("mute: no good answer is known")


class Failing(Copy):
    """Its first task cannot be made, or is not understood by its oracle."""

    name: ClassVar[str] = "failing"

    def __init__(self, *, at: str) -> None:
        super().__init__()
        self._at = at

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        if self._at == "reset":
            sys.exit("the licence has expired")
        return super().reset(task_seed, episode_seed)

    def oracle(self) -> str:
        if self._at == "oracle":
            raise KeyError("board")
        return super().oracle()


class Endless(Copy):
    """Never says that it is over."""

    name: ClassVar[str] = "endless"

    def step(self, reply: str) -> StepResult:
        if self._turn > 2 * self.max_turns:
            raise RuntimeError("nobody counted the turns")
        return replace(super().step(reply), terminated=False)


class Broken(Copy):
    """Fails in its second turn."""

    name: ClassVar[str] = "broken"

    def step(self, reply: str) -> StepResult:
        if self._turn:
            raise RuntimeError("the board is gone")
        return super().step(reply)


class Lost(Copy):
    """Its oracle has an answer to the first turn only."""

    name: ClassVar[str] = "lost"

    def oracle(self) -> str:
        return "" if self._turn else self._letter


class Fragile(Copy):
    """Fails in one task of sixteen."""

    name: ClassVar[str] = "fragile"

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._is_whole = task_seed % 16 != 3
        return super().reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        if not self._is_whole:
            raise RuntimeError("the board is gone")
        return super().step(reply)


class Leaving(Copy):
    """Ends its process in its first turn: with a text, or at once with a code."""

    name: ClassVar[str] = "leaving"

    def __init__(self, *, code: int = 0) -> None:
        super().__init__()
        self._code = code

    def step(self, reply: str) -> StepResult:
        if self._code:
            os._exit(self._code)
        sys.exit("the licence has expired")


class Deadly(Copy):
    """Its process is killed as if by the system: always, or once when `file` says that it was."""

    name: ClassVar[str] = "deadly"

    def __init__(self, *, file: str = "") -> None:
        super().__init__()
        self._file = file

    def step(self, reply: str) -> StepResult:
        if not self._file or not Path(self._file).exists():
            if self._file:
                Path(self._file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(reply)
