"""What a good reasoning states in each environment, read from the text the model sees.

A new environment needs one function `(moment, rng) -> str` and a line in `TEACHERS`. Action games
get noised and poor plans for free; other tasks bring their own `noise` and `guess`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from moored.envs.arithmetic import evaluate
from moored.envs.base import draw_task
from moored.envs.math.word_problems import Problem, make_problem
from moored.envs.math.word_problems.problem import show
from recipes.boilerplate import fill

GRID_ROW = re.compile(r"^[#_O√XPSG]{2,}$", re.MULTILINE)
CELL = re.compile(r"\((\d+), (\d+)\)")
STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
OPERATORS = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a teacher sees when it writes a reply."""

    task_seed: int
    system: str
    first: str
    """First user message."""
    observation: str
    """Latest user message."""
    answer: str
    """The answer the reasoning should lead to."""


def replace_moves(moment: Moment, chance: float, rng: random.Random) -> str:
    """Replace each move by a random one with probability `chance`."""
    actions = action_names(moment.system)
    moves = moment.answer.split(" || ")
    return " || ".join(rng.choice(actions) if rng.random() < chance else move for move in moves)


def random_moves(moment: Moment, rng: random.Random) -> str:
    """Any moves, as many as fit the turn or fewer."""
    actions = action_names(moment.system)
    allowed = re.search(r"at most (\d+) this turn", moment.observation)
    assert allowed is not None, moment.observation
    return " || ".join(rng.choices(actions, k=rng.randint(1, int(allowed[1]))))


@lru_cache(maxsize=256)
def action_names(system: str) -> tuple[str, ...]:
    """The actions a game's system prompt names."""
    line = re.search(r"^Actions: (.*?)\. Give", system, re.MULTILINE)
    assert line is not None, system
    return tuple(line[1].split(", "))


def find_cells(observation: str, label: str, symbols: str) -> list[Cell]:
    """Cells listed after `label`, or where the grid shows one of `symbols`."""
    listed = re.search(rf"^{label}: (.*)$", observation, re.MULTILINE)
    if listed is not None:
        return [(int(row), int(col)) for row, col in CELL.findall(listed[1])]
    rows = GRID_ROW.findall(observation)
    return [(i, j) for i, row in enumerate(rows) for j, mark in enumerate(row) if mark in symbols]


def name_cells(name: str, cells: list[Cell]) -> str:
    """`box at (1, 2)`, `boxes at (1, 2), (3, 4)`, `no hole`."""
    if not cells:
        return f"no {name}"
    plural = name if len(cells) == 1 else f"{name}es" if name.endswith("x") else f"{name}s"
    return f"{plural} at {', '.join(map(str, cells))}"


def name_way(start: Cell, goal: Cell) -> str:
    """`Down 1, Left 2`: how to come from one cell to another on a free floor."""
    down, right = goal[0] - start[0], goal[1] - start[1]
    parts = [f"{'Down' if down > 0 else 'Up'} {abs(down)}"] if down else []
    parts += [f"{'Right' if right > 0 else 'Left'} {abs(right)}"] if right else []
    return ", ".join(parts)


def sokoban_facts(moment: Moment, rng: random.Random) -> str:
    """Where player, boxes and targets are, and how far a lone box has to go."""
    player = find_cells(moment.observation, "Player", "PS")
    boxes = find_cells(moment.observation, "Boxes", "X√")
    targets = find_cells(moment.observation, "Targets", "O√S")
    places = [name_cells(fill("{Player|I am}", rng), player)]
    places += [name_cells("box", boxes), name_cells("target", targets)]
    way = f" {fill('{Push|Box}', rng)} {name_way(boxes[0], targets[0])}." if len(boxes) == 1 else ""
    return f"{', '.join(places)}.{way}"


def frozen_lake_facts(moment: Moment, rng: random.Random) -> str:
    """Where player, goal and holes are, and how far the goal is."""
    player = find_cells(moment.observation, "Player", "P")
    goal = find_cells(moment.observation, "Goal", "G")
    places = [name_cells(fill("{Player|I am}", rng), player), name_cells("goal", goal)]
    places.append(name_cells("hole", find_cells(moment.observation, "Holes", "O")))
    return f"{', '.join(places)}. {fill('{Go|Goal}', rng)} {name_way(player[0], goal[0])}."


def walk_to_goal(moment: Moment) -> str:
    """A frozen lake's plan cut where it reaches the goal; on slippery ice the oracle goes on."""
    goal = find_cells(moment.observation, "Goal", "G")[0]
    num_rows, num_cols = lake_size(moment.observation)
    row, col = find_cells(moment.observation, "Player", "P")[0]
    moves = moment.answer.split(" || ")
    for count, move in enumerate(moves, start=1):
        down, right = STEPS[move]
        row = min(max(row + down, 0), num_rows - 1)
        col = min(max(col + right, 0), num_cols - 1)
        if (row, col) == goal:
            return " || ".join(moves[:count])
    return moment.answer


def lake_size(observation: str) -> tuple[int, int]:
    """Rows and columns of a lake."""
    rows = GRID_ROW.findall(observation)
    if rows:
        return len(rows), len(rows[0])
    stated = re.search(r"Lake: (\d+) rows, (\d+) columns", observation)
    assert stated is not None, observation
    return int(stated[1]), int(stated[2])


def countdown_facts(moment: Moment, rng: random.Random) -> str:
    """The numbers, the target, and the answer worked out operation by operation."""
    stated = re.search(r"Numbers: (.*)\. Target: (\d+)\.", moment.observation)
    assert stated is not None, moment.observation
    lead = fill("{Numbers|I have}", rng)
    return f"{lead} {stated[1]}, target {stated[2]}. {' '.join(working(moment.answer))}"


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


def replace_operator(moment: Moment, chance: float, rng: random.Random) -> str:
    """Exchange one operator; the answer stays an expression of the same numbers."""
    parts = re.split(r"( [-+*/] )", moment.answer)
    place = rng.randrange(1, len(parts), 2)
    parts[place] = f" {rng.choice('+-*')} "
    changed = "".join(parts)
    result = evaluate(changed)
    return moment.answer if result is None or result.value is None else changed


def random_expression(moment: Moment, rng: random.Random) -> str:
    """The numbers in any order with any operators."""
    stated = re.search(r"Numbers: (.*)\. Target", moment.observation)
    assert stated is not None, moment.observation
    numbers = stated[1].split(", ")
    rng.shuffle(numbers)
    return "".join(f" {rng.choice('+-*')} {number}" for number in numbers)[3:]


def bandit_facts(moment: Moment, rng: random.Random) -> str:
    """Which arm is held to be the risky one, and that risk pays."""
    arms = bandit_arms(moment)
    safe = arms[0] if moment.answer == arms[1] else arms[1]
    close = fill("{Risky|The risky arm} pays more on average.", rng)
    return f"{moment.answer} is risky, {safe} is safe. {close}"


def bandit_arms(moment: Moment) -> tuple[str, str]:
    named = re.search(r"The arms are (\w+) and (\w+)\.", moment.observation)
    assert named is not None, moment.observation
    return named[1], named[2]


def other_arm(moment: Moment, chance: float, rng: random.Random) -> str:
    first, second = bandit_arms(moment)
    return second if moment.answer == first else first


def any_arm(moment: Moment, rng: random.Random) -> str:
    return rng.choice(bandit_arms(moment))


WORD_PROBLEM_LEVELS = (1, 1)


def word_problem(task_seed: int) -> Problem:
    """The problem `MetaMath(level=1)` poses for this seed, with its worked solution."""
    return draw_task(
        task_seed,
        make=lambda rng: make_problem(rng, WORD_PROBLEM_LEVELS),
        key=lambda problem: problem.question,
    )[0]


def is_short_problem(task_seed: int) -> bool:
    """True for problems of at most two steps."""
    return word_problem(task_seed).solution.count("\n") <= 2


def word_problem_facts(moment: Moment, rng: random.Random) -> str:
    """The worked solution, made to end in the given answer."""
    problem = word_problem(moment.task_seed)
    *lines, last = problem.solution.split("\n")[:-1]
    return " ".join([*lines, moment.answer.join(last.rsplit(problem.answer, 1))])


def near_number(moment: Moment, chance: float, rng: random.Random) -> str:
    """The answer with its last number changed a little, put right on the second try."""
    if moment.observation != moment.first:
        return moment.answer
    return re.sub(r"\d+$", lambda found: str(int(found[0]) + rng.randint(1, 9)), moment.answer)


def any_number(moment: Moment, rng: random.Random) -> str:
    """A number of the question, or any other."""
    return rng.choice([*re.findall(r"\d+", moment.first), str(rng.randint(1, 99))])


def any_seed(task_seed: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Teacher:
    """How to reason, and how to go wrong, in one environment."""

    facts: Callable[[Moment, random.Random], str]
    noise: Callable[[Moment, float, random.Random], str] = replace_moves
    """(moment, chance per move, rng) -> an answer that may be wrong."""
    guess: Callable[[Moment, random.Random], str] = random_moves
    """A poor answer in the right form."""
    tidy: Callable[[Moment], str] = operator.attrgetter("answer")
    """What to write for the oracle's answer."""
    suits: Callable[[int], bool] = any_seed
    """Task seeds to teach from."""


TEACHERS: dict[str, Teacher] = {
    "sokoban": Teacher(sokoban_facts),
    "frozen_lake": Teacher(frozen_lake_facts, tidy=walk_to_goal),
    "countdown": Teacher(countdown_facts, replace_operator, random_expression),
    "bandit": Teacher(bandit_facts, other_arm, any_arm),
    "metamath": Teacher(word_problem_facts, near_number, any_number, suits=is_short_problem),
}
