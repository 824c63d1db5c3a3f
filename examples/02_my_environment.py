"""An environment of your own: one class, checked by the rules training relies on, then played.

    python examples/02_my_environment.py
    cd examples && moored train grpo env=02_my_environment:GuessNumber

No base class: `reset`, `step`, `oracle` and `close` are all that is required.
"""

from __future__ import annotations

import random

from moored.envs.base import FORMAT_REMINDER, StepResult, draw_task
from moored.envs.check.runner import check_env
from moored.errors import EnvError
from moored.reply import format_reply, parse_reply
from moored.types import Message

NAME = "02_my_environment:GuessNumber"
"""Its name in commands and configurations."""


class GuessNumber:
    """Guess a number between 1 and a bound from "higher" and "lower".

    Reward: 1 when found, 0 otherwise.
    """

    name = "guess_number"
    is_stochastic = False

    def __init__(self, *, max_number: int = 1000, max_turns: int = 10) -> None:
        self.max_number, self.max_turns = max_number, max_turns
        self._number = self._first = self._turns_left = 0
        self._low, self._high = 1, max_number

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        """The seed fixes the task: the number, and the guess that is given away."""
        (self._number, self._first), _ = draw_task(task_seed, self._make_task, key=_shown)
        self._low, self._high, self._turns_left = 1, self.max_number, self.max_turns
        rules = f"Find the number between 1 and {self.max_number}. {FORMAT_REMINDER}."
        return [Message("system", rules), Message("user", self._hint(self._first))]

    def step(self, reply: str) -> StepResult:
        """Judge one reply; a malformed one costs a turn."""
        if self._turns_left == 0:
            raise EnvError(f"{self.name}: the episode is over; call reset before step")
        self._turns_left -= 1
        answer = parse_reply(reply).answer or ""
        is_valid = answer.isascii() and answer.isdecimal() and len(answer) < 10
        success = is_valid and int(answer) == self._number
        # Solved is terminated; out of turns is truncated, since the game could have gone on.
        is_cut = not success and self._turns_left == 0
        self._turns_left = 0 if success else self._turns_left
        text = self._hint(int(answer)) if is_valid else f"That is not a number. {FORMAT_REMINDER}."
        return StepResult(
            observation=text,
            reward=float(success),
            terminated=success,
            truncated=is_cut,
            is_valid=is_valid,
            success=success,
        )

    def oracle(self) -> str:
        """Halve what is left."""
        return str((self._low + self._high) // 2)

    def close(self) -> None:
        """Nothing is open."""

    def _make_task(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(1, self.max_number), rng.randint(1, self.max_number)

    def _hint(self, guess: int) -> str:
        if guess == self._number:
            return f"It is {guess}."
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return f"It is higher than {guess}."
        self._high = min(self._high, guess - 1)
        return f"It is lower than {guess}."


def _shown(task: tuple[int, int]) -> str:
    """What the first prompt shows of a task: tasks that look the same belong to one split."""
    number, first = task
    return f"{first} {number > first} {number == first}"


def main() -> None:
    report = check_env(NAME)
    for check in report.checks:
        print(f"{check.status:<8} {check.name}: {check.detail}")
    assert report.ok
    env = GuessNumber()
    print(env.reset(task_seed=7)[-1].content)
    over = False
    while not over:
        answer = env.oracle()
        result = env.step(format_reply("Halve it.", answer))
        over = result.terminated or result.truncated
        print(f"{answer}? {result.observation}")


if __name__ == "__main__":
    main()
