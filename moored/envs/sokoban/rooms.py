"""What a Sokoban room is, and how rooms are read from rows of symbols and from level files.

A cell is the number `row * cols + col`; a set of cells is an int with one bit per cell. The border
of a room is wall, so a neighbour is always a shift by 1 or by `cols` away and nothing can leave
the board.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from moored.errors import EnvError

SYMBOLS = "#_O√XPS"
"""Wall, floor, target, box on target, box, player, player on target."""

BOXOBAN_SYMBOLS = "# .*$@+"
"""The same, as the public Boxoban files write them."""


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
        raise EnvError(
            f"{place}: a room needs exactly one player, got {players.bit_count()}; "
            f"write {player!r}, or {standing!r} on a target"
        )
    if boxes.bit_count() != targets.bit_count():
        raise EnvError(
            f"{place}: a room needs as many boxes as targets, got {boxes.bit_count()} and "
            f"{targets.bit_count()}; boxes are {box!r} and {done!r}, targets {target!r}, "
            f"{done!r} and {standing!r}"
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
    rooms = tuple(
        parse_room(rows, symbols=BOXOBAN_SYMBOLS, source=str(path), first_line=first_line)
        for first_line, rows in _split_levels(text)
    )
    if not rooms:
        raise EnvError(
            f"the level file {str(path)!r} holds no rooms; after each line that starts with ';' "
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
