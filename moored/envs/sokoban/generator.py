"""Sokoban rooms of a wanted difficulty, made by playing backwards.

From the solved position, one action back at a time, layer n holds every position that takes
exactly n actions to solve. A room is one of those positions, so it is solvable by construction
and its shortest solution is known. Sets of cells are ints (see `rooms.py`): all players of
a layer move at once, and a 6×6 room takes about 0.1 ms.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from moored.envs.sokoban.rooms import Room, bits_of, interior, neighbours
from moored.errors import EnvError

MAX_LAYOUTS = 2000
LAYOUTS_PER_LENGTH = 8
MAX_BOX_SETS = 1000

Layer = dict[int, int]
"""Positions equally far from solved: for each set of boxes, the cells the player may be on."""

T = TypeVar("T")


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
