"""Countdown: combine a few numbers into an expression that hits a target. One turn."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple

from moored.envs.arithmetic import MAX_CHARS, PRECEDENCE, evaluate
from moored.envs.base import FORMAT_REMINDER, SPLIT_SEEDS, StepResult, draw_task, read_range
from moored.envs.math.word_problems.english import show
from moored.envs.teaching import fill
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

MAX_TRIES = 5000
WHOLE_OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
OPERATORS = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
CLAIM = re.compile(r"\s*[-−]?[0-9]+(?:[./][0-9]+)?\s*")
"""What may follow an equals sign."""


@dataclass(frozen=True, slots=True)
class CountdownTask:
    """Numbers, target, and an expression that proves the target can be hit."""

    numbers: tuple[int, ...]
    target: int
    solution: str


class Countdown:
    """Hit the target: combine the numbers with + - * / and brackets, each exactly once.

    A task is three or four numbers and a positive whole target, such as 3, 7, 25 and 46; the
    answer is an expression such as `25 + 7 * 3`. Every task has a solution, and never the plain sum
    or the plain product of all numbers. Intermediate fractions are exact and allowed; `−`, `×` and
    `÷` may be written for `-`, `*` and `/`; a trailing `= 46` is ignored. There is one turn, and
    its answer is judged: the episode is terminated, never truncated.

    Reward: 1 when the value is the target, 0.1 when each number is used exactly once but the
    value is wrong, 0 for anything else (other numbers, powers, a leading minus, division by zero).
    A reply without the required tags earns `format_penalty`.

    Options:
    - `num_numbers=(3, 4)`: how many numbers, as a range or one count, within 2 and 6.
    - `max_number=99`: numbers are drawn from 1 to this, about half of them from 1 to 10.
    - `max_target=99`: targets lie between 1 and this.
    - `format_penalty=-0.1`: reward of a malformed reply.
    """

    name: ClassVar[str] = "countdown"
    is_stochastic: bool = False

    def __init__(
        self,
        *,
        num_numbers: int | Sequence[int] = (3, 4),
        max_number: int = 99,
        max_target: int = 99,
        format_penalty: float = -0.1,
    ) -> None:
        self.num_numbers = read_range("countdown: num_numbers", num_numbers, 2, 6)
        for option, value in {"max_number": max_number, "max_target": max_target}.items():
            if not isinstance(value, int) or not 1 <= value <= 10**6:
                raise EnvError(
                    f"countdown: {option} must be an integer within 1 and 1000000, got {value!r}"
                )
        self.max_turns = 1
        self.max_number = max_number
        self.max_target = max_target
        self.format_penalty = format_penalty
        self._task: CountdownTask | None = None
        self._over = True

    def check_available(self) -> None:
        """Draw a task: options that allow none are refused before a run, not in every episode."""
        draw_task(SPLIT_SEEDS["train"].start, self._make_task, _task_key)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._task, _ = draw_task(task_seed, self._make_task, _task_key)
        self._over = False
        numbers = ", ".join(map(str, self._task.numbers))
        user = f"Numbers: {numbers}. Target: {self._task.target}.\n{FORMAT_REMINDER}."
        return [Message("system", self._rules()), Message("user", user)]

    def step(self, reply: str) -> StepResult:
        if self._over or self._task is None:
            raise EnvError("countdown: the episode is over; call reset before step")
        self._over = True
        answer = parse_reply(reply).answer
        if answer is None:
            return StepResult(
                observation=f"Malformed reply. Reward: {self.format_penalty:g}. Game over.",
                reward=self.format_penalty,
                penalty=self.format_penalty,
                terminated=True,
                is_valid=False,
            )
        reward = score(answer, self._task.numbers, self._task.target)
        verdict = {1.0: "Solved.", 0.1: "The value is not the target. Game over."}
        return StepResult(
            observation=f"Reward: {reward:g}. {verdict.get(reward, 'Game over.')}",
            reward=reward,
            terminated=True,
            success=reward == 1.0,
            metrics={"right_numbers": float(reward > 0.0)},
        )

    def oracle(self) -> str:
        if self._task is None:
            raise EnvError("countdown: there is no task yet; call reset before oracle")
        return self._task.solution

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """The numbers, the target, and the answer worked out operation by operation."""
        assert self._task is not None
        numbers = ", ".join(map(str, self._task.numbers))
        lead = fill("{Numbers|I have}", rng)
        return f"{lead} {numbers}, target {self._task.target}. {' '.join(working(answer))}"

    def guess(self, rng: random.Random) -> str:
        """The numbers in any order with any operators."""
        assert self._task is not None
        numbers = list(self._task.numbers)
        rng.shuffle(numbers)
        return "".join(f" {rng.choice('+-*')} {number}" for number in numbers)[3:]

    def spoil(self, answer: str, chance: float, rng: random.Random) -> str:
        """Draw one operator anew from + - *, now and then the same one again.

        The answer stays an expression of the same numbers.
        """
        parts = re.split(r"( [-+*/] )", answer)
        place = rng.randrange(1, len(parts), 2)
        parts[place] = f" {rng.choice('+-*')} "
        changed = "".join(parts)
        result = evaluate(changed)
        return answer if result is None or result.value is None else changed

    def close(self) -> None:
        self._over = True

    def _make_task(self, rng: random.Random) -> CountdownTask:
        count = rng.randint(*self.num_numbers)
        for _ in range(MAX_TRIES):
            # Half of the numbers are small, or products would hardly ever stay in range.
            highs = [rng.choice((10, self.max_number)) for _ in range(count)]
            numbers = [rng.randint(1, min(high, self.max_number)) for high in highs]
            result = _combine(rng, numbers, self.max_target)
            # One recipe must not fit many tasks: adding, or multiplying, all the numbers.
            if result is not None and result.value not in (sum(numbers), math.prod(numbers)):
                return CountdownTask(tuple(numbers), result.value, result.text)
        raise EnvError(
            f"countdown: no target up to {self.max_target} other than the sum and the product "
            f"found in {MAX_TRIES} draws of numbers up to {self.max_number}; raise max_target, or "
            f"give max_number another value"
        )

    def _rules(self) -> str:
        return (
            "Combine the numbers into an expression that equals the target. Use every number "
            "exactly once, and no others, with + - * / and brackets (no powers, no minus sign in "
            "front of a number). Division is exact.\n"
            "You have one turn. Reward: 1 if the value is the target, 0.1 if every number is used "
            "exactly once but the value is wrong, 0 for any other answer, "
            f"{self.format_penalty:g} for a malformed reply.\n"
            f"{FORMAT_REMINDER}, where the answer is the expression alone."
        )


def score(answer: str, numbers: Sequence[int], target: int) -> float:
    """Reward of an expression: 1 correct, 0.1 right numbers but wrong value, 0 anything else."""
    if len(answer) > MAX_CHARS:
        return 0.0
    # The claimed value is not judged: asking for the target would pay for false claims.
    expression, equals, claim = answer.partition("=")
    if equals and CLAIM.fullmatch(claim) is None:
        return 0.0
    result = evaluate(expression)
    if result is None or result.value is None or sorted(result.numbers) != sorted(numbers):
        return 0.0
    return 1.0 if result.value == target else 0.1


def working(expression: str) -> list[str]:
    """`3 * (2 + 4)` as `2 + 4 = 6.`, `3 * 6 = 18.`"""
    lines: list[str] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(str(node.value))
        assert isinstance(node, ast.BinOp), expression
        left, right = value(node.left), value(node.right)
        sign, apply = OPERATORS[type(node.op)]
        result = apply(left, right)
        lines.append(f"{show(left)} {sign} {show(right)} = {show(result)}.")
        return result

    value(ast.parse(expression, mode="eval").body)
    return lines


def _task_key(task: CountdownTask) -> str:
    """Order does not count: the same numbers shuffled are the same task."""
    return f"{sorted(task.numbers)} {task.target}"


class _Term(NamedTuple):
    value: int
    text: str
    precedence: int


def _combine(rng: random.Random, numbers: Sequence[int], max_target: int) -> _Term | None:
    """Join random pairs by random operators until one value is left; None at a dead end."""
    terms = [_Term(number, str(number), 3) for number in numbers]
    while len(terms) > 1:
        left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        limit = max_target * 10 if terms else max_target
        signs = [sign for sign in WHOLE_OPERATIONS if 0 < _whole(left, sign, right) <= limit]
        if not signs:
            return None
        terms.append(_join(left, rng.choice(signs), right))
    return terms[0]


def _whole(left: _Term, sign: str, right: _Term) -> int:
    """The value of `left sign right`; 0 where it is not whole."""
    if sign == "/" and left.value % right.value:
        return 0
    return WHOLE_OPERATIONS[sign](left.value, right.value)


def _join(left: _Term, sign: str, right: _Term) -> _Term:
    """Write `left sign right` with the fewest brackets."""
    precedence = PRECEDENCE[sign]
    left_text = f"({left.text})" if left.precedence < precedence else left.text
    is_same_level = right.precedence == precedence and sign in "-/"
    is_bracketed = right.precedence < precedence or is_same_level
    right_text = f"({right.text})" if is_bracketed else right.text
    return _Term(_whole(left, sign, right), f"{left_text} {sign} {right_text}", precedence)
