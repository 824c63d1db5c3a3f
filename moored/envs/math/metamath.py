"""MetaMathQA: word problems with retries. Every turn used halves what a right answer earns."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from moored.envs.base import (
    FORMAT_REMINDER,
    StepResult,
    draw_task,
    read_range,
    warn_of_missing_splits,
)
from moored.envs.dataset_rows import Row, load_rows
from moored.envs.math.answer import same_answer
from moored.envs.math.verifier import is_equivalent, require_math_verify, start_verifier
from moored.envs.math.word_problems import LEVELS, make_problem
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

PLAIN_NUMBER = re.compile(r"(-?|-?[0-9]+[./])([0-9]+)")
LAST_DIGIT = re.compile(r"(\^\{?-?|[a-zA-Z])?[0-9]*([0-9])")
"""The last digit of a number; the first group holds what makes it an exponent or part of a word."""


class MetaMath:
    r"""Solve a maths problem; a wrong answer may be tried again, for half the reward.

    Without a `source` the problems are generated: short stories of one to six steps about money,
    rates, ages, fractions and the like, an endless supply with exact answers. With one they are
    real MetaMathQA or GSM8K rows; rewordings of one question stay in one split. Made problems are
    split by their text, so one with other names may be in another split (58 of 512). Answers are
    compared as exact numbers (`1,200`, `$0.50`, `1/2`, `\boxed{\frac{3}{4}}`, `12 km`; units and %
    are not checked), or as text without case and white space.

    Reward: 1 for a right answer on the first turn, then 0.5, 0.25, … on the next ones. A wrong
    answer earns 0, a malformed reply `format_penalty`; both use up the turn. The episode is
    terminated by a right answer or by the last try: the tries are part of the task (each one halves
    the reward), so an episode is never truncated.

    Options:
    - `source=None`: a JSON, JSONL or Parquet file (Parquet needs `moored[data]`), or
      `"hub:owner/name"` (needs `datasets`).
    - `level=(1, 3)`: difficulty of the made problems, one level or a range, 1 easy to 3 hard.
    - `max_turns=5`: tries an episode has.
    - `math_verify=False`: also accept what math-verify finds equivalent (needs `moored[math]`). It
      runs in a process of its own, takes 10 to 300 ms for an answer that is neither plainly right
      nor a plain number, and is stopped after 1 s of computing. Such an answer counts as wrong,
      even if it is not.
    - `format_penalty=-0.1`: reward of a malformed reply.
    """

    name: ClassVar[str] = "metamath"
    is_stochastic: bool = False

    def __init__(
        self,
        *,
        source: str | Path | None = None,
        level: int | Sequence[int] = (1, 3),
        max_turns: int = 5,
        math_verify: bool = False,
        format_penalty: float = -0.1,
    ) -> None:
        self.levels = read_range("metamath: level", level, LEVELS[0], LEVELS[-1])
        if max_turns < 1:
            raise EnvError(f"metamath: max_turns must be at least 1, got {max_turns}")
        if math_verify:
            require_math_verify()
        if source is not None:
            rows = load_rows(source)
            warn_of_missing_splits(source, f"{len(rows)} rows", map(_task_key, rows))
        self.source = source
        self.max_turns = max_turns
        self.math_verify = math_verify
        self.format_penalty = format_penalty
        self._task: Row | None = None
        self._turn = 0
        self._over = True

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        # Rows live in the loader's cache: shared by all instances, never pickled with one.
        rows = None if self.source is None else load_rows(self.source)
        if self.math_verify:
            start_verifier()
        make = self._make_problem if rows is None else lambda rng: rng.choice(rows)
        self._task, _ = draw_task(task_seed, make, _task_key)
        self._turn = 0
        self._over = False
        user = f"{self._turn_line()}\n{self._task.question}\n{FORMAT_REMINDER}."
        return [Message("system", self._rules()), Message("user", user)]

    def step(self, reply: str) -> StepResult:
        if self._over or self._task is None:
            raise EnvError("metamath: the episode is over; call reset before step")
        answer = parse_reply(reply).answer
        is_right = answer is not None and self._is_right(answer, self._task.answer)
        penalty = 0.0 if answer is not None else self.format_penalty
        reward = 0.5**self._turn if is_right else penalty
        self._turn += 1
        self._over = is_right or self._turn >= self.max_turns
        return StepResult(
            observation=self._feedback(answer is not None, is_right, reward),
            reward=reward,
            penalty=penalty,
            terminated=self._over,
            is_valid=answer is not None,
            success=is_right,
            metrics={"num_attempts": float(answer is not None)},
        )

    def oracle(self) -> str:
        if self._task is None:
            raise EnvError("metamath: there is no task yet; call reset before oracle")
        return self._task.answer

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """The worked solution, made to end in the given answer."""
        assert self._task is not None
        *steps, last = self._task.solution.split("\n")
        if not last:
            return f"The answer is {answer}."
        return " ".join([*steps, answer.join(last.rsplit(self._task.answer, 1))])

    def guess(self, rng: random.Random) -> str:
        """A number of the first message, or any other."""
        assert self._task is not None
        asked = f"1 {self.max_turns} {self._task.question}"
        return rng.choice([*re.findall(r"\d+", asked), str(rng.randint(1, 99))])

    def spoil(self, answer: str, chance: float, rng: random.Random) -> str:
        """The answer with one number changed, mostly the last; right again on the second try.

        An answer that no other number makes wrong, such as `Monday`, is replaced by a guess.
        """
        if self._turn > 0:
            return answer
        if plain := PLAIN_NUMBER.fullmatch(answer):
            found = f"{plain[1]}{int(plain[2]) + rng.randint(1, 9)}"
            if not self._is_right(found, answer):  # 2.10 is 2.1
                return found
        changed = (_change_digit(answer, place, rng) for place in _last_digits(answer))
        return next((x for x in changed if not self._is_right(x, answer)), None) or self.guess(rng)

    def close(self) -> None:
        self._over = True

    def _make_problem(self, rng: random.Random) -> Row:
        problem = make_problem(rng, self.levels)
        steps = problem.solution.rpartition("\n")[0]
        return Row(problem.question, problem.answer, problem.question, steps)

    def _is_right(self, answer: str, expected: str) -> bool:
        if same_answer(answer, expected):
            return True
        return self.math_verify and is_equivalent(answer, expected)

    def _rules(self) -> str:
        limits = "You have one turn. A right answer earns 1, a wrong one 0."
        if self.max_turns > 1:
            limits = (
                f"You have at most {self.max_turns} turns. A right answer on the first turn earns "
                "1; every turn used up halves that. A wrong answer earns 0, and you may try again."
            )
        return (
            f"Solve the problem. {limits} A malformed reply earns {self.format_penalty:g} and uses "
            f"up the turn.\n{FORMAT_REMINDER}, where the answer is the final result alone."
        )

    def _turn_line(self) -> str:
        return f"Turn {self._turn + 1} of {self.max_turns}."

    def _feedback(self, is_valid: bool, is_right: bool, reward: float) -> str:
        verdict = "Malformed reply." if not is_valid else "Right." if is_right else "Wrong answer."
        lead = f"{verdict} Reward: {reward:g}."
        if self._over:
            return f"{lead} {'Solved.' if is_right else 'No turns left.'}"
        return f"{lead}\n{self._turn_line()} Try again.\n{FORMAT_REMINDER}."


def _last_digits(answer: str) -> list[int]:
    """Where numbers end, the last number first; exponents and the 2 of `cm2` after all others."""
    found = sorted(LAST_DIGIT.finditer(answer), key=lambda x: (x[1] is not None, -x.start()))
    return [x.start(2) for x in found]


def _change_digit(answer: str, place: int, rng: random.Random) -> str:
    """The answer with another digit there, which is never 0: 1/2 must not become 1/0."""
    digit = rng.choice("123456789".replace(answer[place], ""))
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def _task_key(task: Row) -> str:
    return task.origin
