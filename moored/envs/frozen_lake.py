"""FrozenLake: walk over slippery ice to the goal without falling into a hole.

`Lake` is the map and its dynamics, which are gymnasium's; `FrozenLake` is the game played on it;
`draw_board` paints the picture of the `image` view.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, Unpack, get_args

import numpy as np

from moored.envs.game import Game, Limits, Outcome
from moored.envs.teaching import fill, name_cells, name_way
from moored.errors import EnvError, require_packages
from moored.types import Content, ImagePart

if TYPE_CHECKING:
    from PIL.Image import Image

View = Literal["grid", "coord", "grid_coord", "image"]

# gymnasium's order, a turn of the compass: the neighbours of a direction are perpendicular to it.
DIRECTIONS = ("Left", "Down", "Right", "Up")
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
SYMBOLS = str.maketrans("SFHG", "__OG")
MAX_TRIES = 10_000
NEGLIGIBLE = 1e-4
"""Share of its chance of success the oracle gives up for a shorter game."""
MAX_EXACT_CELLS = 2_500
MAX_EXACT_ACTIONS = 200
"""Up to here the oracle works out exact chances, in under 0.3 s; beyond, it ignores slips."""


@dataclass(frozen=True, slots=True)
class Lake:
    """A map in gymnasium's letters (S start, F frozen, H hole, G goal); cells count row by row."""

    tiles: str
    num_cols: int

    @classmethod
    def from_rows(cls, rows: Sequence[str]) -> Lake:
        tiles = "".join(rows)
        if not tiles or any(len(row) != len(rows[0]) for row in rows) or set(tiles) - set("SFHG"):
            raise EnvError(
                f"frozen_lake: map must be rows of equal length in the letters S, F, H, G, "
                f"got {list(rows)}"
            )
        if tiles.count("S") != 1 or "G" not in tiles:
            raise EnvError(
                f"frozen_lake: map needs exactly one S (start) and at least one G (goal), "
                f"got {tiles.count('S')} and {tiles.count('G')}"
            )
        return cls(tiles, len(rows[0]))

    @property
    def start(self) -> int:
        return self.tiles.index("S")

    def move(self, cell: int, direction: int) -> int:
        """The neighbouring cell; the same cell at the edge."""
        row, col = divmod(cell, self.num_cols)
        down, right = STEPS[direction]
        row, col = row + down, col + right
        if not (0 <= col < self.num_cols and 0 <= row * self.num_cols < len(self.tiles)):
            return cell
        return row * self.num_cols + col

    def is_end(self, cell: int) -> bool:
        return self.tiles[cell] in "HG"

    def outcomes(self, cell: int, direction: int, slip: float) -> list[tuple[float, int]]:
        """(probability, next cell) of a move: 1 - slip as intended, slip / 2 to either side."""
        if self.is_end(cell):
            return [(1.0, cell)]
        chances = ((slip / 2, direction - 1), (1 - slip, direction), (slip / 2, direction + 1))
        return [(chance, self.move(cell, aim % 4)) for chance, aim in chances if chance > 0]

    def path(self, cell: int) -> list[int] | None:
        """Directions of the shortest safe path from a cell to a goal; None without a path."""
        before: dict[int, tuple[int, int]] = {cell: (cell, -1)}
        queue = [cell]
        for here in queue:
            if self.tiles[here] == "G":
                return _trace(before, here)
            for direction in range(4):
                after = self.move(here, direction)
                if after not in before and self.tiles[after] != "H":
                    before[after] = here, direction
                    queue.append(after)
        return None

    def distance(self) -> int | None:
        """Moves on the shortest safe path from start to goal; None without a path."""
        path = self.path(self.start)
        return None if path is None else len(path)


def _trace(before: dict[int, tuple[int, int]], cell: int) -> list[int]:
    """The directions walked to `cell`; `before` maps a cell to the one before and the direction."""
    directions = []
    while (direction := before[cell][1]) >= 0:
        directions.append(direction)
        cell = before[cell][0]
    return directions[::-1]


class FrozenLake(Game[Lake]):
    """Walk over the ice to the goal; a hole ends the game, and the ice may be slippery.

    An action is Left, Down, Right or Up; walking against the edge changes nothing. With probability
    `slip` a move goes perpendicular to the chosen direction, to either side equally likely. Each
    episode draws its own slips. The dynamics are gymnasium's: `slip=2/3` is `is_slippery=True`.
    Drawn maps have a random start and goal and can be solved within the actions allowed. The oracle
    plays for the best chance (on over 2,500 tiles or 200 actions: the shortest safe path).

    Reward: 1 for reaching the goal, 0 for any other action. A malformed reply earns
    `format_penalty`.

    Options:
    - `size=4`: tiles per side of drawn maps.
    - `frozen=0.9`: probability that a tile is ice, not a hole.
    - `slip=0.02`: from 0, never, to 1, always.
    - `map=None`: play this one map, in rows of S, F, H, G as gymnasium writes them; whether the
      actions allowed reach its goal is not checked.
    - `view="grid"`: symbols; or positions (`coord`), both (`grid_coord`), a picture (`image`,
      needs `moored[images]`).
    - `tile_px=32`: pixels per tile in the picture.
    - `max_turns=5`, `max_actions=10`, `max_actions_per_turn=2`: limits of an episode.
    - `format_penalty=None`: reward of a malformed reply; None: −0.1, as no action costs anything.
    """

    name: ClassVar[str] = "frozen_lake"
    is_stochastic: bool = True
    actions: ClassVar[tuple[str, ...]] = DIRECTIONS

    def __init__(
        self,
        *,
        size: int = 4,
        frozen: float = 0.9,
        slip: float = 0.02,
        map: str | Sequence[str] | None = None,
        view: View = "grid",
        tile_px: int = 32,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(**limits)
        for option, chance in (("frozen", frozen), ("slip", slip)):
            if not 0 <= chance <= 1:
                raise EnvError(f"frozen_lake: {option} is a probability in [0, 1], got {chance}")
        for option, value, least in (("size", size, 2), ("tile_px", tile_px, 8)):
            if value < least:
                raise EnvError(f"frozen_lake: {option} must be at least {least}, got {value}")
        if view not in get_args(View):
            raise EnvError(f"frozen_lake: view must be one of {get_args(View)}, got {view!r}")
        if view == "image":
            require_packages("frozen_lake: view='image'", ("PIL",))
        self.size = size
        self.frozen = frozen
        self.slip = slip
        self.is_stochastic = slip > 0
        self.view = view
        self.tile_px = tile_px
        rows = map.split() if isinstance(map, str) else map
        self._map = None if rows is None else Lake.from_rows(rows)

    def rules(self) -> str:
        slips = (
            f"The ice is slippery: with probability {self.slip:g} a move goes perpendicular to the "
            f"direction you chose, to either side equally likely."
            if self.slip
            else "The ice is not slippery: every move goes where you aim."
        )
        legend = []
        if "grid" in self.view:
            legend.append("P you, _ ice, O hole, G goal, X you in a hole, √ you on the goal.")
        if "coord" in self.view:
            legend.append("Positions are (row, column); (0, 0) is the top left tile.")
        if self.view == "image":
            legend.append(
                "You wear a red coat; the ice is pale, holes are dark, the goal is a flag."
            )
        return (
            "You stand on a frozen lake and walk to the goal. Reaching the goal earns 1, any other "
            "action 0. Falling into a hole ends the game. Walking against the edge leaves you "
            f"where you are.\n{slips}\n{' '.join(legend)}"
        )

    def make_task(self, rng: random.Random) -> Lake:
        """Draw start, goal and tiles until the goal can be reached with the actions allowed."""
        size, num_cells = self.size, self.size**2
        for _ in range(MAX_TRIES):
            start, goal = rng.sample(range(num_cells), 2)
            (row, col), (goal_row, goal_col) = divmod(start, size), divmod(goal, size)
            if abs(row - goal_row) + abs(col - goal_col) > self.action_budget:
                continue
            tiles = ["F" if rng.random() < self.frozen else "H" for _ in range(num_cells)]
            tiles[start], tiles[goal] = "S", "G"
            lake = Lake("".join(tiles), size)
            distance = lake.distance()
            if distance is not None and distance <= self.action_budget:
                return lake
        raise EnvError(
            f"frozen_lake: no map of size {size} with frozen={self.frozen} could be solved in "
            f"{self.action_budget} actions in {MAX_TRIES} draws; raise frozen or max_actions"
        )

    def task_options(self) -> Hashable | None:
        return self.size, self.frozen, self.action_budget

    def task_key(self, task: Lake) -> str:
        return f"{task.num_cols} {task.tiles}"

    def start(self, task: Lake, noise: random.Random) -> None:
        self._lake = task
        self._noise = noise
        self._cell = task.start
        self._odds: _Odds | None = None

    def act(self, action: str) -> Outcome:
        draw = self._noise.random()
        turn_aside = 0 if draw >= self.slip else 1 if draw < self.slip / 2 else -1
        direction = (DIRECTIONS.index(action) + turn_aside) % 4
        before, self._cell = self._cell, self._lake.move(self._cell, direction)
        success = self._lake.tiles[self._cell] == "G"
        return Outcome(
            reward=float(success),
            terminated=self._lake.is_end(self._cell),
            success=success,
            changed=self._cell != before,
        )

    def state(self) -> Content:
        rows = self._symbol_rows()
        if self.view == "image":
            return [ImagePart(type="image", image=draw_board(rows, self.tile_px))]
        grid, coord = "\n".join(rows), self._positions()
        return {"grid": grid, "coord": coord, "grid_coord": f"{grid}\n{coord}"}[self.view]

    def plan(self) -> list[str]:
        """The actions most likely to lead to the goal; without slips, the shortest safe path.

        Slips are seen only after the turn, so each action is chosen for all the cells it may start
        from. Call it again every turn. On maps of over 2,500 tiles, and with over 200 actions left,
        it is the shortest safe path too.
        """
        lake, budget = self._lake, self.actions_left
        is_large = len(lake.tiles) > MAX_EXACT_CELLS or budget > MAX_EXACT_ACTIONS
        if lake.is_end(self._cell):
            return []
        if self.slip == 0 or is_large:
            aims = lake.path(self._cell) or [0]  # any move, when the goal is out of reach
            return [DIRECTIONS[aim] for aim in aims[:budget]]
        if self._odds is None:
            self._odds = _Odds(lake, self.slip, budget)
        return [DIRECTIONS[aim] for aim in self._odds.plan(self._cell, budget)]

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """Where player, goal and holes are, and how far the goal is."""
        player = divmod(self._cell, self._lake.num_cols)
        goals, holes = self._cells_of("G"), self._cells_of("H")
        places = [name_cells(fill("{Player|I am}", rng), [player]), name_cells("goal", goals)]
        places.append(name_cells("hole", holes))
        way = name_way(player, goals[0])
        return f"{', '.join(places)}. {fill('{Go|Goal}', rng)} {way}."

    def _cells_of(self, tile: str) -> list[tuple[int, int]]:
        cells = (cell for cell, found in enumerate(self._lake.tiles) if found == tile)
        return [divmod(cell, self._lake.num_cols) for cell in cells]

    def _fixed_task(self) -> Lake | None:
        return self._map

    def _symbol_rows(self) -> list[str]:
        here = {"H": "X", "G": "√"}.get(self._lake.tiles[self._cell], "P")
        symbols = self._lake.tiles.translate(SYMBOLS)
        symbols = symbols[: self._cell] + here + symbols[self._cell + 1 :]
        return _rows(symbols, self._lake.num_cols)

    def _positions(self) -> str:
        tiles, num_cols = self._lake.tiles, self._lake.num_cols
        cells = {
            "Player": [self._cell],
            "Goal": [cell for cell, tile in enumerate(tiles) if tile == "G"],
            "Holes": [cell for cell, tile in enumerate(tiles) if tile == "H"],
        }
        lines = [f"Lake: {len(tiles) // num_cols} rows, {num_cols} columns"]
        for label, places in cells.items():
            listed = ", ".join(f"({cell // num_cols}, {cell % num_cols})" for cell in places)
            lines.append(f"{label}: {listed or 'none'}")
        return "\n".join(lines)


class _Odds:
    """Exact chances on one lake: `values[h, cell]` is the best chance with h actions to go."""

    def __init__(self, lake: Lake, slip: float, horizon: int) -> None:
        cells = range(len(lake.tiles))
        table = [[_padded(lake.outcomes(cell, aim, slip)) for aim in range(4)] for cell in cells]
        outcomes = np.array(table)
        # (cell, aim, outcome)
        self.chances, self.nexts = outcomes[..., 0], outcomes[..., 1].astype(int)
        self.is_end = np.array([lake.is_end(cell) for cell in cells])
        self.values = np.array([[tile == "G" for tile in lake.tiles]] * (horizon + 1), float)
        for last, value in pairwise(self.values):
            value[:] = self.prospects(last).max(axis=1)

    def prospects(self, values: np.ndarray) -> np.ndarray:
        """Mean value after each move, by cell and aim."""
        return (self.chances * values[self.nexts]).sum(axis=2)

    def plan(self, cell: int, horizon: int) -> list[int]:
        """The best moves as long as some cell they may lead to is not an end."""
        plan, places = [], np.zeros(len(self.is_end))
        places[cell] = 1.0
        while len(plan) < horizon and places[~self.is_end].any():
            aim = self._best_aim(places, horizon - len(plan))
            reached = places[:, None] * self.chances[:, aim]
            places = np.bincount(self.nexts[:, aim].ravel(), reached.ravel(), len(places))
            plan.append(aim)
        return plan

    def _best_aim(self, places: np.ndarray, horizon: int) -> int:
        """The best move, in no more actions than are of use: without slips, the shortest way."""
        success = np.einsum("hc,c->h", self.values[: horizon + 1], places)
        is_enough = success[1:] >= (1 - NEGLIGIBLE) * success[horizon]
        useful = 1 + int(is_enough.argmax())
        scores = np.einsum("c,ca->a", places, self.prospects(self.values[useful - 1]))
        # The first of equals, also where equals differ by rounding.
        return int((scores >= scores.max() - 1e-12).argmax())


def _padded(outcomes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return (outcomes + [(0.0, 0)] * 2)[:3]


def _rows(cells: str, num_cols: int) -> list[str]:
    return [cells[first : first + num_cols] for first in range(0, len(cells), num_cols)]


# What each symbol's tile shows: ImageDraw method, x, y, x, y ... on a 32 x 32 canvas, colour.
SHAPES = (
    ("_OGPX√", "rectangle", (0, 0, 32, 32), "#9cc5dc"),  # ice
    ("_OGPX√", "rectangle", (1, 1, 31, 31), "#dcf0fa"),
    ("_GP√", "polygon", (4, 10, 10, 4, 12, 4, 4, 12), "#ffffff"),
    ("_GP√", "polygon", (20, 28, 28, 20, 28, 22, 22, 28), "#ffffff"),
    ("OX", "ellipse", (2, 4, 30, 29), "#7fb2cd"),  # hole
    ("OX", "ellipse", (4, 8, 28, 28), "#0f2c47"),
    ("G√", "rectangle", (5, 3, 7, 28), "#5a4432"),  # flag
    ("G√", "polygon", (7, 3, 28, 9, 7, 15), "#149a43"),
    ("P√", "rectangle", (13, 22, 16, 29), "#27303f"),  # player
    ("P√", "rectangle", (18, 22, 21, 29), "#27303f"),
    ("P√", "polygon", (14, 12, 20, 12, 25, 20, 21, 24, 13, 24, 9, 20), "#d8262c"),
    ("P√", "ellipse", (12, 3, 22, 13), "#27303f"),
    ("P√", "ellipse", (13, 6, 21, 14), "#f3c39b"),
    ("X", "polygon", (5, 7, 8, 7, 13, 19, 9, 21), "#d8262c"),  # player in the hole
    ("X", "polygon", (27, 7, 24, 7, 19, 19, 23, 21), "#d8262c"),
    ("X", "ellipse", (11, 9, 21, 19), "#27303f"),
    ("X", "ellipse", (12, 12, 20, 20), "#f3c39b"),
)


def draw_board(rows: Sequence[str], tile_px: int) -> Image:
    """Picture of a board in symbols, `tile_px` pixels per tile."""
    from PIL import Image

    board = Image.new("RGB", (len(rows[0]) * tile_px, len(rows) * tile_px))
    for row, symbols in enumerate(rows):
        for col, symbol in enumerate(symbols):
            board.paste(_draw_tile(symbol, tile_px), (col * tile_px, row * tile_px))
    return board


@lru_cache(maxsize=64)
def _draw_tile(symbol: str, tile_px: int) -> Image:
    """One tile, painted large and scaled down smoothly."""
    from PIL import Image, ImageDraw

    scale = 8
    tile = Image.new("RGB", (32 * scale, 32 * scale))
    pen = ImageDraw.Draw(tile)
    for symbols, method, points, colour in SHAPES:
        if symbol in symbols:
            getattr(pen, method)([scale * point for point in points], fill=colour)
    return tile.resize((tile_px, tile_px), Image.Resampling.BOX)
