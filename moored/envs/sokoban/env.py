"""Sokoban: push every box onto a target."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Unpack

from moored.envs.base import warn_of_missing_splits
from moored.envs.game import Game, Limits, Outcome
from moored.envs.sokoban.rooms import (
    Room,
    draw_rows,
    interior,
    make_room,
    numbers_of,
    parse_room,
    read_levels,
)
from moored.envs.sokoban.solver import solve
from moored.envs.teaching import fill, name_cells, name_way
from moored.envs.tiles import SOKOBAN_LEGEND, SOKOBAN_TILES, draw_tiles
from moored.errors import EnvError, close_match_hint, require_packages
from moored.types import Content, ImagePart

VIEWS = ("grid", "coord", "grid_coord", "image")
MAX_SIDE = 64

BLOCKED = Outcome(-0.1, changed=False)
MOVED = Outcome(-0.1)
ON_TARGET = Outcome(-0.1 + 1)
OFF_TARGET = Outcome(-0.1 - 1)
SOLVED = Outcome(-0.1 + 1 + 10, terminated=True, success=True)


class Sokoban(Game[Room]):
    """Push every box onto a target. Boxes cannot be pulled, so a careless push may be final.

    Reward: −0.1 for every action, +1 for a box that comes onto a target, −1 for one that leaves
    it, +10 when all boxes are on targets, which ends the game. A blocked move costs its −0.1 too.

    Rooms are drawn at random and can always be solved within the action budget (`max_actions`,
    or all turns filled, whichever is less). Size, boxes and the length of the shortest solution
    set the difficulty. A room of your own is given as rows of the symbols `#` wall, `_` floor,
    `O` target, `√` box on target, `X` box, `P` player, `S` player on target:

        Sokoban(level=["#####", "#PXO#", "#####"], max_turns=5, max_actions=10)

    Options:
        rows, cols (6, 6): size of drawn rooms, the border of wall included.
        boxes (1): boxes in drawn rooms.
        min_solution, max_solution (2, the action budget): range of the shortest solution of drawn
            rooms, in actions. Exact for one box and for two on 8×8; in larger rooms with more
            boxes the shortest may fall below the minimum.
        view ("grid_coord"): `grid` of symbols; `coord`, lists of (row, col) cells; `grid_coord`,
            both; `image`, a picture (needs `moored[images]`).
        tile_px (32): pixels per tile in the `image` view.
        level (None): play this one room, given as rows or as one string of lines.
        levels_file (None): draw rooms from a file in the public Boxoban format. Whether its rooms
            fit the budget is not checked; Boxoban's 10×10 rooms with four boxes need far more
            than the default, e.g. max_turns=60, max_actions=120.
        max_turns (5), max_actions (10), max_actions_per_turn (2): limits of an episode.
        format_penalty (None): reward of a malformed reply. None: it costs what the dearest valid
            turn may, 0.1 for each action that fits (so −0.2), and with several boxes 1 for each
            push off a target that fits. −0.1 is RAGEN's rule, cheaper than two moves.
    """

    name: ClassVar[str] = "sokoban"
    actions: ClassVar[tuple[str, ...]] = ("Up", "Down", "Left", "Right")

    def __init__(
        self,
        *,
        rows: int = 6,
        cols: int = 6,
        boxes: int = 1,
        min_solution: int | None = None,
        max_solution: int | None = None,
        view: str = "grid_coord",
        tile_px: int = 32,
        level: str | Sequence[str] | None = None,
        levels_file: str | Path | None = None,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(**limits)
        if view not in VIEWS:
            raise EnvError(f"sokoban: unknown view {view!r}; {close_match_hint(view, VIEWS)}")
        if view == "image":
            require_packages("sokoban: view='image'", ("PIL",))
        if not 4 <= tile_px <= 256:
            raise EnvError(f"sokoban: tile_px must lie in 4 to 256, got {tile_px}")
        self.view, self.tile_px = view, tile_px
        self._size = _check_size(rows, cols, boxes)
        self._lengths = _solution_lengths(min_solution, max_solution, self.action_budget)
        if level is not None and levels_file is not None:
            raise EnvError("sokoban: level and levels_file were both given; leave one out")
        is_drawn = level is None and levels_file is None
        if not is_drawn and (min_solution, max_solution) != (None, None):
            raise EnvError("sokoban: min_solution and max_solution are for drawn rooms")
        self._level = None if level is None else parse_room(_as_rows(level))
        self._levels = () if levels_file is None else read_levels(levels_file)
        if self._levels:
            rooms = f"{len(self._levels)} rooms"
            warn_of_missing_splits(levels_file, rooms, map(self.task_key, self._levels))

    def rules(self) -> str:
        return (
            "You play Sokoban: push every box onto a target.\n"
            "Up and Down move you one row up or down, Left and Right one column. Moving into a "
            "box pushes it one cell on, if that cell holds no wall and no other box; otherwise "
            "nothing moves. Boxes cannot be pulled.\n"
            f"{_legend(self.view)}\n"
            "Rewards: -0.1 for each action, +1 when a box comes onto a target, -1 when a box "
            "leaves a target, +10 when all boxes are on targets, which ends the game."
        )

    def make_task(self, rng: random.Random) -> Room:
        if self._levels:
            return self._levels[int(rng.random() * len(self._levels))]
        rows, cols, boxes = self._size
        return make_room(rng, rows, cols, boxes, self._lengths)

    def task_options(self) -> Hashable | None:
        return None if self._levels else (*self._size, self._lengths)

    def task_key(self, task: Room) -> str:
        parts = (task.rows, task.cols, task.walls, task.targets, task.boxes, task.player)
        return " ".join(map(str, parts))

    def start(self, task: Room, noise: random.Random) -> None:
        self._room = task
        self._boxes = task.boxes
        self._player = task.player
        self._steps = {"Up": -task.cols, "Down": task.cols, "Left": -1, "Right": 1}

    def dearest_turn(self) -> float:
        # A box can be pushed off while another one is not on its target; else the room is solved.
        num_off = min(self.turn_budget, self._boxes.bit_count() - 1)
        return num_off - self.turn_budget * MOVED.reward

    def act(self, action: str) -> Outcome:
        step = self._steps[action]
        ahead = self._player + step
        to = 1 << ahead
        if self._room.walls & to:
            return BLOCKED
        if not self._boxes & to:
            self._player = ahead
            return MOVED
        beyond = 1 << ahead + step
        if (self._room.walls | self._boxes) & beyond:
            return BLOCKED
        self._player = ahead
        self._boxes ^= to | beyond
        targets = self._room.targets
        if self._boxes == targets:
            return SOLVED
        was_on, is_on = bool(targets & to), bool(targets & beyond)
        if was_on == is_on:
            return MOVED
        return ON_TARGET if is_on else OFF_TARGET

    def state(self) -> Content:
        if self.view == "image":
            rows = draw_rows(self._room, self._boxes, self._player)
            picture = draw_tiles(rows, SOKOBAN_TILES, self.tile_px)
            return [ImagePart(type="image", image=picture)]
        return _state_text(self.view, self._room, self._boxes, self._player)

    def plan(self) -> list[str]:
        return solve(self._room, self._boxes, self._player) or []

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """Where player, boxes and targets are, and how far a lone box has to go."""
        cols = self._room.cols
        masks = (1 << self._player, self._boxes, self._room.targets)
        player, boxes, targets = ([divmod(c, cols) for c in numbers_of(mask)] for mask in masks)
        places = [name_cells(fill("{Player|I am}", rng), player)]
        places += [name_cells("box", boxes), name_cells("target", targets)]
        if len(boxes) > 1:
            return f"{', '.join(places)}."
        way = name_way(boxes[0], targets[0])
        return f"{', '.join(places)}. {fill('{Push|Box}', rng)} {way}."

    def _fixed_task(self) -> Room | None:
        return self._level


@lru_cache(maxsize=4096)  # the episodes of a group come through the same positions
def _state_text(view: str, room: Room, boxes: int, player: int) -> str:
    """A position in one of the views that are text."""
    if view == "coord":
        return f"{_walls_text(room)}\n{_coord_text(room, boxes, player)}"
    grid = "\n".join(draw_rows(room, boxes, player))
    return grid if view == "grid" else f"{grid}\n{_coord_text(room, boxes, player)}"


def _coord_text(room: Room, boxes: int, player: int) -> str:
    return (
        f"Player: {_coords(1 << player, room.cols)}\n"
        f"Boxes: {_coords(boxes, room.cols)}\n"
        f"Targets: {_coords(room.targets, room.cols)}"
    )


def _walls_text(room: Room) -> str:
    inner = room.walls & interior(room.rows, room.cols)
    return (
        f"Room: {room.rows} rows, {room.cols} columns; rows 0 and {room.rows - 1} and columns "
        f"0 and {room.cols - 1} are wall.\n"
        f"Inner walls: {_coords(inner, room.cols) or 'none'}"
    )


def _coords(cells: int, cols: int) -> str:
    return ", ".join(f"({cell // cols}, {cell % cols})" for cell in numbers_of(cells))


def _legend(view: str) -> str:
    symbols = (
        "Symbols: # wall, _ floor, O target, √ box on target, X box, P you, S you on a target."
    )
    coords = "Cells are given as (row, col), counted from (0, 0) in the top left corner."
    legends = {
        "grid": symbols,
        "coord": coords,
        "grid_coord": f"{symbols}\n{coords}",
        "image": f"The picture shows: {SOKOBAN_LEGEND}.",
    }
    return legends[view]


def _as_rows(level: Sequence[str]) -> Sequence[str]:
    """The rows as given, or the lines of one string."""
    rows = level.split() if isinstance(level, str) else level
    if not all(isinstance(row, str) for row in rows):
        raise EnvError(f"sokoban: level must be rows of text, got {rows!r}; quote them in YAML")
    return rows


def _check_size(rows: int, cols: int, boxes: int) -> tuple[int, int, int]:
    for option, side in (("rows", rows), ("cols", cols)):
        if not 3 <= side <= MAX_SIDE:
            raise EnvError(f"sokoban: {option} must lie in 3 to {MAX_SIDE}, got {side}")
    if boxes < 1:
        raise EnvError(f"sokoban: boxes must be at least 1, got {boxes}")
    num_cells = (rows - 2) * (cols - 2)
    if num_cells < 2 * boxes + 1:
        raise EnvError(
            f"sokoban: {boxes} boxes with their targets and the player need {2 * boxes + 1} cells "
            f"inside the border, {rows}×{cols} has {num_cells}; enlarge rows and cols"
        )
    return rows, cols, boxes


def _solution_lengths(shortest: int | None, longest: int | None, budget: int) -> range:
    longest = budget if longest is None else longest
    shortest = min(2, longest) if shortest is None else shortest
    if not 1 <= shortest <= longest <= budget:
        raise EnvError(
            f"sokoban: the shortest solution must take 1 <= min_solution <= max_solution <= "
            f"{budget} actions, got {shortest} and {longest}; {budget} is the action budget, "
            f"raise max_turns, max_actions or max_actions_per_turn for longer ones"
        )
    return range(shortest, longest + 1)
