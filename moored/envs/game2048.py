"""2048: slide and merge tiles until one reaches the target.

The first board comes from the task; the tiles that appear later are noise of the episode.
"""

from __future__ import annotations

import functools
import random
from typing import ClassVar, Unpack

from moored.envs.game import Game, Limits, Outcome
from moored.envs.teaching import fill
from moored.errors import EnvError

Board = tuple[tuple[int, ...], ...]
"""Rows of tiles; 0 is an empty cell."""

LOOKAHEAD = 5


class Game2048(Game[Board]):
    """Slide the tiles of a square board; equal tiles that meet merge into one of twice the value.

    The game starts half-way: the target tile is split in two, then a random piece of it again, and
    so on, and the pieces lie scattered over the board. Merge them all back in time. After every
    action that changes the board a 2 (one time in ten a 4) appears on a random empty cell, another
    one in every episode.

    Reward: for a merge that makes a new largest tile, its increase over the last largest /
    `target`. Everything else earns 0, and an action that changes nothing counts too. The game ends
    with the target tile, or when no action changes the board. By default the oracle, a search that
    ignores new tiles, wins 88 % of the games; random play wins 11 %.

    Options: `size` (4) rows and columns, 3 to 5 · `target` (64) the tile to make, a power of two ·
    `splits` (5) how often the target is split for the first board; None is the usual start with two
    tiles, where a high target needs high limits · `max_turns` (5), `max_actions` (10),
    `max_actions_per_turn` (2), `format_penalty` (None: −0.1, as no action costs anything).
    """

    name: ClassVar[str] = "2048"
    is_stochastic: bool = True
    actions: ClassVar[tuple[str, ...]] = ("Up", "Down", "Left", "Right")

    def __init__(
        self,
        *,
        size: int = 4,
        target: int = 64,
        splits: int | None = 5,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(**limits)
        self.size = size
        self.target = target
        self.splits = splits
        budget = self.action_budget
        if not 3 <= size <= 5:
            raise EnvError(f"2048: size must be 3, 4 or 5, got {size}")
        if target < 8 or target.bit_count() != 1:
            raise EnvError(f"2048: target must be a power of two from 8, got {target}")
        # Splitting ends at 2s; an empty cell must be left to move; one action may merge one pair.
        most = min(target // 2 - 1, size**2 - 2, budget)
        if splits is not None and not 1 <= splits <= most:
            raise EnvError(
                f"2048: splits must be 1 to {most} for target {target}, size {size} and "
                f"{budget} actions, got {splits}; lower splits or raise the limits"
            )
        # Two tiles at the start and one after each action except the last, if all are 2s.
        if splits is None and target > 2 * (budget + 1):
            raise EnvError(
                f"2048: target {target} is out of reach of two tiles in {budget} actions; lower "
                f"target, raise the limits, or set splits"
            )

    def rules(self) -> str:
        return (
            f"You play 2048 on a {self.size}x{self.size} board; '.' is an empty cell. Make a tile "
            f"of {self.target}.\n"
            "An action slides all tiles in one direction as far as they go. Two equal tiles that "
            "meet merge into their sum; a merged tile does not merge again in the same action. "
            "If the board changed, a new tile, 2 or rarely 4, appears on a random empty cell.\n"
            f"A merge that makes a new largest tile earns what it has more than the largest tile "
            f"before, / {self.target}; everything else earns 0. The game ends when {self.target} "
            "is made or no action changes the board."
        )

    def make_task(self, rng: random.Random) -> Board:
        if self.splits is None:
            empty: Board = ((0,) * self.size,) * self.size
            return add_tile(add_tile(empty, rng), rng)
        tiles = split_tile(self.target, self.splits, rng)
        cells = [0] * self.size**2
        for cell, tile in zip(rng.sample(range(len(cells)), len(tiles)), tiles, strict=True):
            cells[cell] = tile
        return tuple(tuple(cells[at : at + self.size]) for at in range(0, len(cells), self.size))

    def task_key(self, task: Board) -> str:
        return draw_board(task)

    def start(self, task: Board, noise: random.Random) -> None:
        self._board = task
        self._noise = noise

    def act(self, action: str) -> Outcome:
        board, _ = slide(self._board, action)
        if board == self._board:
            return Outcome(0.0, changed=False)
        reward = (largest_tile(board) - largest_tile(self._board)) / self.target
        self._board = board
        if has_tile(board, self.target):
            return Outcome(reward, terminated=True, success=True)
        self._board = add_tile(board, self._noise)
        return Outcome(reward, terminated=not can_move(self._board))

    def state(self) -> str:
        return draw_board(self._board)

    def plan(self) -> list[str]:
        """The actions that would merge most, and soonest, if no new tiles appeared."""
        return self._search(self._board, LOOKAHEAD)[1]

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """Where each tile lies, the largest first, and what the first action merges."""
        tiles = sorted(
            (-tile, (at, column))
            for at, row in enumerate(self._board)
            for column, tile in enumerate(row)
            if tile
        )
        listed = ", ".join(f"{-tile} at {cell}" for tile, cell in tiles)
        first = (self.parse(answer) or [answer])[0]
        merged = slide(self._board, first)[1]
        what = f"merges tiles into {merged}" if merged else fill("{only moves|merges nothing}", rng)
        return f"{fill('{Tiles|I see}', rng)} {listed}. {first} {what}."

    def _search(self, board: Board, depth: int) -> tuple[float, list[str]]:
        best: tuple[float, list[str]] = (0.0, [])
        for action in self.actions:
            following, merged = slide(board, action)
            if following == board:
                continue
            value, rest = float(merged), []
            if has_tile(following, self.target):
                value += 10.0 * self.target
            elif depth > 1:
                later, rest = self._search(following, depth - 1)
                value += later
            # Discounted, so that of two ways to the same merges the shorter one wins.
            if not best[1] or 0.95 * value > best[0]:
                best = (0.95 * value, [action, *rest])
        return best


def slide(board: Board, action: str) -> tuple[Board, int]:
    """The board after all tiles slid, without the new tile, and the sum of the merged tiles."""
    is_vertical = action in ("Up", "Down")
    order = -1 if action in ("Down", "Right") else 1
    lines = zip(*board, strict=True) if is_vertical else board
    slid = [slide_line(line[::order]) for line in lines]
    moved = tuple(line[::order] for line, _ in slid)
    if is_vertical:
        moved = tuple(zip(*moved, strict=True))
    return moved, sum(merged for _, merged in slid)


@functools.lru_cache(maxsize=1 << 16)
def slide_line(line: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """One line slid towards its start, and the sum of its merged tiles."""
    slid: list[int] = []
    merged = 0
    can_merge = False
    for tile in filter(None, line):
        if can_merge and slid[-1] == tile:
            slid[-1] += tile
            merged += slid[-1]
            can_merge = False
        else:
            slid.append(tile)
            can_merge = True
    return (*slid, *[0] * (len(line) - len(slid))), merged


def add_tile(board: Board, rng: random.Random) -> Board:
    """Put a 2, one time in ten a 4, on a random empty cell."""
    empty = [(r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if not tile]
    at, column = rng.choice(empty)
    tile = 4 if rng.random() < 0.1 else 2
    row = (*board[at][:column], tile, *board[at][column + 1 :])
    return (*board[:at], row, *board[at + 1 :])


def split_tile(tile: int, num_splits: int, rng: random.Random) -> list[int]:
    """Halve a random piece of `tile` again and again; the pieces add up to `tile`."""
    pieces = [tile]
    for _ in range(num_splits):
        index = rng.choice([index for index, piece in enumerate(pieces) if piece > 2])
        half = pieces[index] // 2
        pieces[index : index + 1] = [half, half]
    return pieces


def largest_tile(board: Board) -> int:
    return max(map(max, board))


def has_tile(board: Board, tile: int) -> bool:
    return any(tile in row for row in board)


def can_move(board: Board) -> bool:
    """True when some action changes the board."""
    return any(slide(board, action)[0] != board for action in Game2048.actions)


def draw_board(board: Board) -> str:
    """Rows of right-aligned tiles; a dot is an empty cell."""
    width = max(len(str(tile)) for row in board for tile in row)
    return "\n".join(" ".join(f"{tile or '.':>{width}}" for tile in row) for row in board)
