"""What an environment may offer beside `oracle`, so that its demonstrations are more than answers.

Each of the three methods is optional. `moored sft` calls them in the state that the next reply will
meet: after `reset`, or after a `step` that did not end the episode. Randomness is an argument, so
demonstrations repeat.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

CHOICE = re.compile(r"\{([^{}]*)\}")
Cell = tuple[int, int]
"""(row, column)."""


@runtime_checkable
class Reasons(Protocol):
    """An environment that can say what a good reasoning states."""

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """Facts of what the model sees, in words that lead to `answer`."""
        ...


@runtime_checkable
class Guesses(Protocol):
    """An environment that can name an answer without solving the task."""

    def guess(self, rng: random.Random) -> str:
        """Any answer in the right form, drawn at random."""
        ...


@runtime_checkable
class Spoils(Protocol):
    """An environment that knows how a good answer goes wrong; others replace it by a guess."""

    def spoil(self, answer: str, chance: float, rng: random.Random) -> str:
        """The answer with mistakes; each of its parts is wrong with probability `chance`.

        An answer that has one part is spoilt whatever the chance.
        """
        ...


def fill(pattern: str, rng: random.Random) -> str:
    """Settle every choice of a pattern: `I {think|guess} so.` has one."""
    return CHOICE.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def name_cells(name: str, cells: Sequence[Cell]) -> str:
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
