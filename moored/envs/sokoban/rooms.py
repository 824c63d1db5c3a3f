"""What a Sokoban room is, how rooms are read from level files, and how new ones are made.

A cell is the number `row * cols + col`; a set of cells is an int with one bit per cell. The border
of a room is wall, so a neighbour is always a shift by 1 or by `cols` away and nothing can leave
the board.

A new room is made by playing backwards: from the solved position, one action back at a time, layer
n holds every position that takes exactly n actions to solve. A room is one of those positions, so
it is solvable by construction and its shortest solution is known. All players of a layer move at
once, and a 6×6 room takes about 0.1 ms.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

from moored.errors import EnvError

SYMBOLS = "#_O√XPS"
"""Wall, floor, target, box on target, box, player, player on target."""

BOXOBAN_SYMBOLS = "# .*$@+"
"""The same, as the public Boxoban files write them."""

MAX_LAYOUTS = 2000
LAYOUTS_PER_LENGTH = 8
MAX_BOX_SETS = 1000

Layer = dict[int, int]
"""Positions equally far from solved: for each set of boxes, the cells the player may be on."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Room:
    """A start position. `player` is a cell; walls, targets and boxes are sets of cells."""

    rows: int
    cols: int
    walls: int
    targets: int
    boxes: int
    player: int

    @property
    def floor(self) -> int:
        """All cells that are not wall."""
        return (1 << self.rows * self.cols) - 1 & ~self.walls


def bits_of(cells: int) -> list[int]:
    """The members of a set of cells, each as a set of one, lowest first."""
    bits = []
    while cells:
        bits.append(cells & -cells)
        cells &= cells - 1
    return bits


def numbers_of(cells: int) -> list[int]:
    """The members of a set of cells as numbers, lowest first."""
    return [bit.bit_length() - 1 for bit in bits_of(cells)]


def neighbours(cells: int, cols: int) -> int:
    """All cells next to a cell of the set."""
    return cells << 1 | cells >> 1 | cells << cols | cells >> cols


def interior(rows: int, cols: int) -> int:
    """All cells inside the border."""
    return sum(((1 << cols - 2) - 1) << row * cols + 1 for row in range(1, rows - 1))


def draw_rows(room: Room, boxes: int, player: int) -> list[str]:
    """The room as rows of symbols, with boxes and player where they are now."""
    symbols = list(_floor_plan(room))
    for cell in numbers_of(boxes):
        symbols[cell] = "√" if symbols[cell] == "O" else "X"
    symbols[player] = "S" if symbols[player] == "O" else "P"
    board = "".join(symbols)
    return [board[start : start + room.cols] for start in range(0, len(board), room.cols)]


@lru_cache(maxsize=64)
def _floor_plan(room: Room) -> str:
    """Walls, targets and floor, which stay as they are throughout an episode."""
    symbols = ["_"] * (room.rows * room.cols)
    for cell in numbers_of(room.walls):
        symbols[cell] = "#"
    for cell in numbers_of(room.targets):
        symbols[cell] = "O"
    return "".join(symbols)


def parse_room(
    rows: Sequence[str], *, symbols: str = SYMBOLS, source: str = "level", first_line: int = 1
) -> Room:
    """Read rows of symbols. The room must be a closed rectangle that is not solved yet."""
    _check_rows(rows, symbols, source, first_line)
    wall, _, target, done, box, player, standing = symbols
    board = "".join(rows)
    walls, targets, boxes, players = (
        sum(1 << cell for cell, symbol in enumerate(board) if symbol in kind)
        for kind in (wall, target + done + standing, box + done, player + standing)
    )
    place = f"{source}, room at line {first_line}"
    if players.bit_count() != 1:
        raise EnvError(f"{place}: a room needs exactly one player, got {players.bit_count()}")
    if boxes.bit_count() != targets.bit_count():
        raise EnvError(
            f"{place}: a room needs as many boxes as targets, got {boxes.bit_count()} and "
            f"{targets.bit_count()}; {done!r} is both, {standing!r} is a target"
        )
    if boxes == targets:
        raise EnvError(f"{place}: nothing is left to solve; add a box {box!r} off its target")
    return Room(len(rows), len(rows[0]), walls, targets, boxes, players.bit_length() - 1)


def _check_rows(rows: Sequence[str], symbols: str, source: str, first_line: int) -> None:
    if not rows or not rows[0]:
        raise EnvError(f"{source}, line {first_line}: the room is empty; give its rows of symbols")
    for number, row in enumerate(rows):
        place = f"{source}, line {first_line + number}"
        strange = next((symbol for symbol in row if symbol not in symbols), None)
        if strange is not None:
            raise EnvError(f"{place}: unknown symbol {strange!r}; use only {symbols!r}")
        if len(row) != len(rows[0]):
            raise EnvError(
                f"{place}: all rows of a room must be equally long, got {len(row)} symbols "
                f"after {len(rows[0])} in its first row"
            )
        border = row if number in (0, len(rows) - 1) else row[0] + row[-1]
        if border.strip(symbols[0]):
            raise EnvError(
                f"{place}: the border must be wall, got {row!r}; close it with {symbols[0]!r}"
            )


def read_levels(path: str | Path) -> tuple[Room, ...]:
    """All rooms of a Boxoban level file; they are separated by lines that start with `;`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(
            f"cannot read the level file {str(path)!r} ({error}); levels_file takes one text "
            f"file in the Boxoban format"
        ) from error
    return _parse_levels(text, str(path))


@lru_cache(maxsize=4)  # a run makes an environment for each of its episodes
def _parse_levels(text: str, source: str) -> tuple[Room, ...]:
    rooms = tuple(
        parse_room(rows, symbols=BOXOBAN_SYMBOLS, source=source, first_line=first_line)
        for first_line, rows in _split_levels(text)
    )
    if not rooms:
        raise EnvError(
            f"the level file {source!r} holds no rooms; after each line that starts with ';' "
            f"give rows of {BOXOBAN_SYMBOLS!r}"
        )
    return rooms


def _split_levels(text: str) -> Iterator[tuple[int, list[str]]]:
    """The first line number and the rows of each room."""
    lines = enumerate((line.rstrip() for line in text.splitlines()), start=1)
    for is_room, block in groupby(lines, key=lambda line: line[1] != "" and line[1][0] != ";"):
        if is_room:
            numbers, rows = zip(*block, strict=True)
            yield numbers[0], list(rows)


def make_room(rng: random.Random, rows: int, cols: int, num_boxes: int, lengths: range) -> Room:
    """Draw a room whose shortest solution has a number of actions in `lengths`.

    Every length is about equally likely as far as such rooms have it. No box starts on a target.
    A layer of more than MAX_BOX_SETS box placements (many boxes, long solutions) is thinned out;
    the room is then solvable in the length drawn, but a shorter way may exist.
    """
    inside = interior(rows, cols)
    wanted = _draw(rng, lengths)
    for attempt in range(1, MAX_LAYOUTS + 1):
        floor = _draw_floor(rng, inside, cols)
        if floor.bit_count() <= 2 * num_boxes:
            continue
        targets = _draw_targets(rng, floor, num_boxes)
        layers = islice(_play_backwards(rng, floor, targets, cols), wanted + 1)
        starts = _starts_by_length(layers, targets, lengths[0])
        if wanted not in starts and attempt % LAYOUTS_PER_LENGTH == 0:
            wanted = _draw(rng, list(starts) or lengths)
        if wanted in starts:
            boxes, player = _draw_position(rng, starts[wanted])
            return Room(rows, cols, (1 << rows * cols) - 1 & ~floor, targets, boxes, player)
    raise EnvError(
        f"found no {rows}×{cols} room with {num_boxes} boxes that takes {lengths[0]} to "
        f"{lengths[-1]} actions in {MAX_LAYOUTS} layouts; change rows, cols or boxes, or widen "
        f"min_solution and max_solution"
    )


def _draw(rng: random.Random, choices: Sequence[T]) -> T:
    return choices[int(rng.random() * len(choices))]


def _draw_cell(rng: random.Random, cells: int) -> int:
    """One cell of a set, as a set of one; empty when the set is."""
    for _ in range(int(rng.random() * cells.bit_count())):
        cells &= cells - 1
    return cells & -cells


def _draw_floor(rng: random.Random, inside: int, cols: int) -> int:
    """A connected floor; each cell inside became wall with probability 1/4, 3/8 or 1/2."""
    a, b, c = (rng.getrandbits(inside.bit_length()) for _ in range(3))
    open_cells = inside & ~_draw(rng, (a & b, a & (b | c), a))
    floor, wave = 0, _draw_cell(rng, open_cells)
    while wave:
        floor |= wave
        wave = neighbours(wave, cols) & open_cells & ~floor
    return floor


def _draw_targets(rng: random.Random, floor: int, num_boxes: int) -> int:
    targets = 0
    for _ in range(num_boxes):
        targets |= _draw_cell(rng, floor & ~targets)
    return targets


def _draw_position(rng: random.Random, layer: Layer) -> tuple[int, int]:
    """The boxes and the player's cell of one position of a layer, all equally likely."""
    index = int(rng.random() * sum(players.bit_count() for players in layer.values()))
    for boxes, players in layer.items():
        if index < players.bit_count():
            return boxes, bits_of(players)[index].bit_length() - 1
        index -= players.bit_count()
    raise AssertionError("the index lies inside the layer")


def _starts_by_length(layers: Iterator[Layer], targets: int, shortest: int) -> dict[int, Layer]:
    """The positions of each layer that have no box on a target; layers without any left out."""
    starts = {}
    for length, layer in enumerate(layers):
        start = {boxes: players for boxes, players in layer.items() if not boxes & targets}
        if start and length >= shortest:
            starts[length] = start
    return starts


def _play_backwards(rng: random.Random, floor: int, targets: int, cols: int) -> Iterator[Layer]:
    """Yield layer 0 (solved), layer 1, … until no new position is left."""
    seen = {targets: floor}
    layer = {targets: floor & ~targets}
    while layer:
        yield layer
        earlier: Layer = {}
        for boxes, players in layer.items():
            free = floor & ~boxes
            for before, came_from in (
                (boxes, neighbours(players, cols) & free),
                *_pulls(players, boxes, free, cols),
            ):
                new = came_from & ~seen.get(before, 0)
                if new:
                    earlier[before] = earlier.get(before, 0) | new
        layer = _thin_out(rng, earlier)
        for boxes, players in layer.items():
            seen[boxes] = seen.get(boxes, 0) | players


def _pulls(players: int, boxes: int, free: int, cols: int) -> Iterator[tuple[int, int]]:
    """Boxes and player before each push: the player steps back and the box takes its place."""
    for step in (1, cols):
        for cell in bits_of(players & boxes << step & free >> step):
            yield boxes ^ cell ^ cell >> step, cell << step
        for cell in bits_of(players & boxes >> step & free << step):
            yield boxes ^ cell ^ cell << step, cell >> step


def _thin_out(rng: random.Random, layer: Layer) -> Layer:
    if len(layer) <= MAX_BOX_SETS:
        return layer
    return dict(sorted(layer.items(), key=lambda _: rng.random())[:MAX_BOX_SETS])
