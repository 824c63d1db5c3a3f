"""Sudoku, 4×4 or 9×9: puzzles with one solution that fit the action budget.

Cells are numbered row by row; 0 is an empty cell.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Unpack

from moored.envs.base import read_range
from moored.envs.game import Game, Limits, Outcome
from moored.envs.teaching import fill
from moored.errors import EnvError

MAX_BLANKS = {4: 10, 9: 50}
"""By size; with more empty cells puzzles with one solution are slow to find."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """The given cells and the only way to complete them."""

    cells: tuple[int, ...]
    solution: tuple[int, ...]


class Sudoku(Game[Puzzle]):
    """Fill the empty cells so that every row, column and box holds each digit once.

    An action writes one digit: `r2c3=4` puts 4 into row 2, column 3. Every puzzle has exactly one
    solution, and digits are checked against it: a wrong digit is rejected, so the puzzle can
    always still be solved. Filled cells cannot be changed.

    Reward: 1 / (cells empty at the start) for each right digit, 1 for the whole puzzle. A wrong
    digit or a cell that is filled already costs as much and leaves the board as it is, so that
    guessing does not pay.

    Options: `size` (4) or 9, with boxes of 2×2 or 3×3 · `blanks` ((4, 8)) empty cells, a number or
    a (fewest, most) pair; at most 10 for size 4, 50 for size 9, and never more than the actions an
    episode can hold · `max_turns` (5), `max_actions` (10), `max_actions_per_turn` (2),
    `format_penalty` (None: a malformed reply costs as much as a turn full of wrong digits, at
    least 0.1).
    """

    name: ClassVar[str] = "sudoku"

    def __init__(
        self,
        *,
        size: int = 4,
        blanks: int | Sequence[int] = (4, 8),
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(**limits)
        if size not in MAX_BLANKS:
            raise EnvError(f"sudoku: size must be 4 or 9, got {size!r}")
        most = min(MAX_BLANKS[size], self.action_budget)
        room = f"size {size} allows {MAX_BLANKS[size]}, an episode holds {self.action_budget}"
        self.size = size
        self.blanks = read_range(f"sudoku: blanks ({room} actions)", blanks, 1, most)

    @property
    def actions(self) -> tuple[str, ...]:
        return _placements(self.size)

    def rules(self) -> str:
        box = math.isqrt(self.size)
        return (
            f"Complete the {self.size}x{self.size} Sudoku: every row, every column and every "
            f"{box}x{box} box must hold each digit from 1 to {self.size} once. '.' is an empty "
            "cell; r1 is the top row, c1 the left column. There is exactly one solution.\n"
            f"A right digit earns 1/{self._num_blanks}. A digit that differs from the solution, or "
            f"a cell that is filled already, earns -1/{self._num_blanks} and changes nothing."
        )

    def make_task(self, rng: random.Random) -> Puzzle:
        num_blanks = rng.randint(*self.blanks)
        while True:
            solution = next(solutions([0] * self.size**2, rng))
            cells = remove_cells(solution, num_blanks, rng)
            if cells is not None:
                return Puzzle(cells, solution)

    def task_options(self) -> Hashable | None:
        return self.size, self.blanks

    def task_key(self, task: Puzzle) -> str:
        return draw_grid(task.cells)

    def start(self, task: Puzzle, noise: random.Random) -> None:
        self._cells = list(task.cells)
        self._solution = task.solution
        self._num_blanks = task.cells.count(0)

    def dearest_turn(self) -> float:
        return self.turn_budget / self._num_blanks

    def act(self, action: str) -> Outcome:
        row, column, digit = (int(action[at]) for at in (1, 3, 5))
        cell = (row - 1) * self.size + column - 1
        if self._cells[cell] or digit != self._solution[cell]:
            return Outcome(-1.0 / self._num_blanks, changed=False)
        self._cells[cell] = digit
        is_solved = all(self._cells)
        return Outcome(1.0 / self._num_blanks, terminated=is_solved, success=is_solved)

    def state(self) -> str:
        return draw_grid(self._cells)

    def plan(self) -> list[str]:
        return [
            f"r{cell // self.size + 1}c{cell % self.size + 1}={digit}"
            for cell, digit in enumerate(self._solution)
            if not self._cells[cell]
        ]

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """Which digits the row, the column and the box of each cell already hold."""
        return " ".join(self._reason(action, rng) for action in self.parse(answer) or [])

    def _reason(self, action: str, rng: random.Random) -> str:
        row, column, digit = action[1], action[3], action[5]
        own = _units(self.size)[(int(row) - 1) * self.size + int(column) - 1]
        in_row, in_column, in_box = map(self._held, own)
        return (
            f"Row {row} has {in_row}, column {column} has {in_column}, the box {in_box}. "
            f"{fill('{So|Then}', rng)} r{row}c{column} is {digit}."
        )

    def _held(self, unit: int) -> str:
        """The digits that a row, column or box has."""
        cells = zip(self._cells, _units(self.size), strict=True)
        digits = sorted(digit for digit, units in cells if digit and unit in units)
        return " ".join(map(str, digits)) or "nothing"

    def parse(self, answer: str) -> list[str] | None:
        return super().parse(answer.replace(" ", ""))

    def action_text(self) -> str:
        # All placements by name would be hundreds of words; their pattern says the same.
        return "r<row>c<column>=<digit>, for example r2c3=4 writes 4 into row 2, column 3"


@functools.cache
def _placements(size: int) -> tuple[str, ...]:
    digits = range(1, size + 1)
    return tuple(
        f"r{row}c{column}={digit}" for row in digits for column in digits for digit in digits
    )


@functools.cache
def _units(size: int) -> tuple[tuple[int, int, int], ...]:
    """For each cell the numbers of its row, its column and its box."""
    box = math.isqrt(size)
    return tuple(
        (row, size + column, 2 * size + row // box * box + column // box)
        for row in range(size)
        for column in range(size)
    )


def solutions(cells: Sequence[int], rng: random.Random | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to complete a grid; with `rng`, in random order."""
    size = math.isqrt(len(cells))
    used = [0] * (3 * size)
    for units, digit in zip(_units(size), cells, strict=True):
        for unit in units:
            used[unit] |= 1 << digit
    blanks = [cell for cell, digit in enumerate(cells) if not digit]
    return _complete(list(cells), blanks, used, rng)


def _complete(
    grid: list[int], blanks: list[int], used: list[int], rng: random.Random | None
) -> Iterator[tuple[int, ...]]:
    """Fill `blanks`, the cell with the fewest digits left first; bit d of `used` is digit d."""
    if not blanks:
        yield tuple(grid)
        return
    size = len(used) // 3
    units = _units(size)
    taken = {
        cell: used[units[cell][0]] | used[units[cell][1]] | used[units[cell][2]] for cell in blanks
    }
    cell = max(blanks, key=lambda cell: taken[cell].bit_count())
    rest = [blank for blank in blanks if blank != cell]
    free = [digit for digit in range(1, size + 1) if not taken[cell] >> digit & 1]
    if rng is not None:
        rng.shuffle(free)
    for digit in free:
        grid[cell] = digit
        for unit in units[cell]:
            used[unit] ^= 1 << digit
        yield from _complete(grid, rest, used, rng)
        for unit in units[cell]:
            used[unit] ^= 1 << digit


def remove_cells(
    solution: tuple[int, ...], num_blanks: int, rng: random.Random
) -> tuple[int, ...] | None:
    """Empty random cells while one solution remains; None when too few can be emptied."""
    cells = list(solution)
    for cell in rng.sample(range(len(cells)), len(cells)):
        if cells.count(0) == num_blanks:
            break
        cells[cell] = 0
        if not has_one_solution(cells):
            cells[cell] = solution[cell]
    return tuple(cells) if cells.count(0) == num_blanks else None


def has_one_solution(cells: Sequence[int]) -> bool:
    return len(list(islice(solutions(cells), 2))) == 1


def draw_grid(cells: Sequence[int]) -> str:
    """The grid with row and column labels; lines mark the boxes."""
    size = math.isqrt(len(cells))
    box = math.isqrt(size)

    def line(label: str, entries: list[str]) -> str:
        boxes = [" ".join(entries[at : at + box]) for at in range(0, size, box)]
        return f"{label} {' | '.join(boxes)}"

    rule = "   " + "-+-".join(["-" * (3 * box - 1)] * box)
    lines = [line("  ", [f"c{column}" for column in range(1, size + 1)])]
    for row in range(size):
        if row % box == 0:
            lines.append(rule)
        digits = cells[row * size : (row + 1) * size]
        lines.append(line(f"r{row + 1}", [f"{digit or '.':>2}" for digit in digits]))
    return "\n".join(lines)
