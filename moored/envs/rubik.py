"""Rubik's 2×2 cube: scrambles of a known distance, turned back one quarter turn at a time.

A cube is 24 bytes: where each sticker is now. Stickers and places are numbered alike, four to a
face in the order U L F R B D, so the solved cube is 0 … 23 and a turn is one `bytes.translate`.
The corner where Down, Back and Left meet never moves, so every position has exactly one code.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

from moored.envs.base import read_range
from moored.envs.game import Game, Limits, Outcome
from moored.envs.teaching import fill

MOVE_REWARD = -0.1
SOLVED_REWARD = 10.0
SOLVED = bytes(range(24))
COLOURS = "wogrby"
"""Letters of the faces U L F R B D when white is up and green in front."""

CYCLES = {
    "U": ((0, 1, 3, 2), (8, 4, 16, 12), (9, 5, 17, 13)),
    "R": ((12, 13, 15, 14), (9, 1, 18, 21), (11, 3, 16, 23)),
    "F": ((8, 9, 11, 10), (2, 12, 21, 7), (3, 14, 20, 5)),
}
"""Places a clockwise turn carries into each other, first to second and so on round:

             0  1
             2  3
     4  5    8  9   12 13   16 17
     6  7   10 11   14 15   18 19
            20 21
            22 23
"""


def _turns() -> dict[str, bytes]:
    """For each action, the table that maps a sticker's place to its next place."""
    turns = {}
    for name, cycles in CYCLES.items():
        table = bytearray(range(256))
        for cycle in cycles:
            for place, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                table[place] = following
        turns[name] = bytes(table)
        turns[f"{name}'"] = bytes(table).translate(table).translate(table)
    return turns


TURNS = _turns()
INVERSE = {name: name[0] if name.endswith("'") else f"{name}'" for name in TURNS}

MAX_DEPTH = 11
"""Positions 12 to 14 turns away exist, but are slow or rare to draw."""
TABLE_RADIUS = 6


@dataclass(frozen=True, slots=True)
class Scramble:
    """A cube to solve, and the colours of its faces U L F R B D once solved."""

    cube: bytes
    colours: str


class Rubik(Game[Scramble]):
    """Solve a 2×2 cube by quarter turns of the Up, Right and Front faces.

    The cube is shown as an unfolded net of colour letters and starts exactly `depth` quarter turns
    away from solved, held in any of the 24 ways a cube can be held, all of which belong to one
    split. A half turn is two actions.

    Reward: −0.1 for every turn, +10 when each face shows one colour, which ends the game.

    Options: `depth` ((1, 4)) quarter turns to the solution, a number or a (fewest, most) pair; at
    most 11, and never more than the actions an episode can hold · `max_turns` (5), `max_actions`
    (10), `max_actions_per_turn` (2), `format_penalty` (None: a malformed reply costs as much as a
    turn full of actions, 0.2 by default).
    """

    name: ClassVar[str] = "rubik"
    actions: ClassVar[tuple[str, ...]] = tuple(TURNS)

    def __init__(
        self,
        *,
        depth: int | Sequence[int] = (1, 4),
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(**limits)
        most = min(MAX_DEPTH, self.action_budget)
        option = f"rubik: depth (an episode holds {self.action_budget} actions)"
        self.depth = read_range(option, depth, 1, most)

    def rules(self) -> str:
        return (
            "Solve the 2x2 Rubik's cube: every face must show a single colour.\n"
            "The cube is shown as an unfolded net of colour letters (w white, y yellow, g green, "
            "b blue, r red, o orange): the Up face on top, then Left, Front, Right, Back side by "
            "side, the Down face at the bottom. Up and Down are drawn as they join Front.\n"
            "U, R and F turn the Up, Right or Front face a quarter turn clockwise, seen from "
            "outside; U', R' and F' turn it counter-clockwise.\n"
            f"Each turn of a face earns {MOVE_REWARD:g}; solving the cube earns "
            f"{SOLVED_REWARD:g} more and ends the game."
        )

    def parse(self, answer: str) -> list[str] | None:
        return super().parse(answer.replace("’", "'"))

    def make_task(self, rng: random.Random) -> Scramble:
        depth = rng.randint(*self.depth)
        while True:
            layers, _ = _table()
            cube = rng.choice(layers[min(depth, TABLE_RADIUS)])
            for _ in range(depth - TABLE_RADIUS):
                cube = cube.translate(TURNS[rng.choice(self.actions)])
            if len(solve(cube)) == depth:
                return Scramble(cube, rng.choice(_colourings()))

    def task_key(self, task: Scramble) -> str:
        # Without the colours: a cube held in another way is the same task. Hashed from this text,
        # even the six cubes of depth 1 fall into all three splits.
        return f"cube {task.cube.hex()}"

    def start(self, task: Scramble, noise: random.Random) -> None:
        self._cube = task.cube
        self._colours = task.colours

    def dearest_turn(self) -> float:
        return -self.turn_budget * MOVE_REWARD

    def act(self, action: str) -> Outcome:
        self._cube = self._cube.translate(TURNS[action])
        if self._cube == SOLVED:
            return Outcome(MOVE_REWARD + SOLVED_REWARD, terminated=True, success=True)
        return Outcome(MOVE_REWARD)

    def state(self) -> str:
        return draw_net(self._cube, self._colours)

    def plan(self) -> list[str]:
        return solve(self._cube)

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """The colours of the three faces that can be turned, and the turns of the answer."""
        letters = letters_of(self._cube, self._colours)
        faces = {"Up": 0, "Front": 8, "Right": 12}
        shown = ", ".join(f"{name} {''.join(letters[at : at + 4])}" for name, at in faces.items())
        turns = ", then ".join(self.parse(answer) or [])
        return f"{shown}. {fill('{I turn|So}', rng)} {turns}."


def letters_of(cube: bytes, colours: str) -> list[str]:
    """The colour at each of the 24 places, face by face: Up, Left, Front, Right, Back, Down."""
    letters = [""] * 24
    for sticker, place in enumerate(cube):
        letters[place] = colours[sticker // 4]
    return letters


def draw_net(cube: bytes, colours: str) -> str:
    """The unfolded cube, six lines of colour letters."""
    letters = letters_of(cube, colours)
    rows = [f"{letters[at]} {letters[at + 1]}" for at in range(0, 24, 2)]
    up, band, down = rows[:2], rows[2:10], rows[10:]
    sides = ["  ".join(band[half::2]) for half in (0, 1)]
    return "\n".join([f"     {row}" for row in up] + sides + [f"     {row}" for row in down])


def solve(cube: bytes) -> list[str]:
    """A shortest sequence of quarter turns that solves `cube`.

    Searches outwards until it meets the table of positions near the solved one. The first meeting
    is on the table's rim, so no shorter way exists.
    """
    _, near = _table()
    last_turn, frontier = {cube: ""}, [cube]
    while not (meetings := [position for position in frontier if position in near]):
        frontier = _expand(frontier, last_turn)
    there, back = _trace(meetings[0], last_turn), _trace(meetings[0], near)
    return there + [INVERSE[name] for name in reversed(back)]


@functools.cache
def _table() -> tuple[list[list[bytes]], dict[bytes, str]]:
    """The positions up to TABLE_RADIUS quarter turns from solved, by distance; and the turn that
    reaches each on a shortest way out, empty for the solved cube.
    """
    layers, last_turn = [[SOLVED]], {SOLVED: ""}
    for _ in range(TABLE_RADIUS):
        layers.append(_expand(layers[-1], last_turn))
    return layers, last_turn


def _expand(frontier: list[bytes], last_turn: dict[bytes, str]) -> list[bytes]:
    """The new positions one turn beyond `frontier`, each entered in `last_turn`."""
    reached = []
    for position in frontier:
        for name, turn in TURNS.items():
            following = position.translate(turn)
            if following not in last_turn:
                last_turn[following] = name
                reached.append(following)
    return reached


def _trace(cube: bytes, last_turn: dict[bytes, str]) -> list[str]:
    """The turns from where a search began to `cube`."""
    names = []
    while name := last_turn[cube]:
        names.append(name)
        cube = cube.translate(TURNS[INVERSE[name]])
    return names[::-1]


@functools.cache
def _colourings() -> tuple[str, ...]:
    """Face colours of the solved cube in each of the 24 ways it can be held."""
    found = [COLOURS]
    for up, left, front, right, back, down in found:
        tilted = front + left + down + right + up + back
        spun = up + front + right + back + left + down
        found += [colours for colours in (tilted, spun) if colours not in found]
    return tuple(found)
