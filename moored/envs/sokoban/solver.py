"""The shortest solution of a Sokoban position, by A* over pushes.

A position is the boxes and the player right after a push; the next pushes are all that the
player can walk to. A push costs the moves of the walk plus one, so the shortest path is the
shortest list of actions. The estimate counts the pushes each box needs on an empty floor.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise

from moored.envs.sokoban.rooms import Room, bits_of, neighbours

MAX_EXPANDED = 100_000

Position = tuple[int, int]
"""The boxes and the player, both as sets of cells (see `rooms.py`)."""


def solve(room: Room, boxes: int, player: int) -> list[str] | None:
    """The shortest actions that put every box on a target.

    None when there are none, or when none were found within MAX_EXPANDED positions: rooms up to
    two boxes take milliseconds, Boxoban's 10×10 with four boxes up to seconds.
    """
    floor, cols = room.floor, room.cols
    num_pushes = _pushes_to_target(floor, room.targets, cols)
    if any(box not in num_pushes for box in bits_of(boxes)):
        return None
    not_dead = sum(num_pushes)
    start: Position = (boxes, 1 << player)
    cost, parent = {start: 0}, {start: start}
    estimate = sum(num_pushes[box] for box in bits_of(boxes))
    queue = [(estimate, estimate, start)]
    for _ in range(MAX_EXPANDED):
        if not queue:
            return None
        total, estimate, position = heapq.heappop(queue)
        if position[0] == room.targets:
            return _actions(parent, position, floor, cols)
        if total > cost[position] + estimate:
            continue
        for moves, after in _next_pushes(position, floor, not_dead, cols):
            new_cost = cost[position] + moves
            if new_cost < cost.get(after, new_cost + 1):
                cost[after], parent[after] = new_cost, position
                left, entered = position[0] & ~after[0], after[0] & ~position[0]
                ahead = estimate - num_pushes[left] + num_pushes[entered]
                heapq.heappush(queue, (new_cost + ahead, ahead, after))
    return None


def _pushes_to_target(floor: int, targets: int, cols: int) -> dict[int, int]:
    """For each cell, the pushes a lone box needs to the nearest target; dead cells are missing."""
    num_pushes, seen, wave = {}, 0, targets
    distance = 0
    while wave:
        num_pushes.update(dict.fromkeys(bits_of(wave), distance))
        seen |= wave
        distance += 1
        wave = (
            floor
            & ~seen
            & (
                wave >> 1 & floor << 1
                | wave << 1 & floor >> 1
                | wave >> cols & floor << cols
                | wave << cols & floor >> cols
            )
        )
    return num_pushes


def _next_pushes(
    position: Position, floor: int, landing: int, cols: int
) -> Iterator[tuple[int, Position]]:
    """Every push onto a free cell of `landing`, with the actions it takes, the walk included."""
    boxes, wave = position
    free = floor & ~boxes
    reached, moves = 0, 0
    while wave:
        reached |= wave
        moves += 1
        for after in _pushes(wave, boxes, free & landing, cols):
            yield moves, after
        wave = neighbours(wave, cols) & free & ~reached


def _pushes(players: int, boxes: int, landing: int, cols: int) -> Iterator[Position]:
    """The position after each push by a player who stands next to a box."""
    for step in (1, cols):
        for cell in bits_of(players & boxes >> step & landing >> 2 * step):
            yield boxes ^ cell << step ^ cell << 2 * step, cell << step
        for cell in bits_of(players & boxes << step & landing << 2 * step):
            yield boxes ^ cell >> step ^ cell >> 2 * step, cell >> step


def _actions(
    parent: dict[Position, Position], position: Position, floor: int, cols: int
) -> list[str]:
    """The actions that lead through the chain of parents to `position`."""
    chain = [position]
    while parent[chain[-1]] != chain[-1]:
        chain.append(parent[chain[-1]])
    steps = []
    for (boxes, player), (boxes_after, pushed_from) in pairwise(reversed(chain)):
        step = (boxes_after & ~boxes).bit_length() - pushed_from.bit_length()
        behind = pushed_from >> step if step > 0 else pushed_from << -step
        steps += [*_walk(player, behind, floor & ~boxes, cols), step]
    names = {-cols: "Up", cols: "Down", -1: "Left", 1: "Right"}
    return [names[step] for step in steps]


def _walk(player: int, goal: int, free: int, cols: int) -> list[int]:
    """The moves of a shortest walk, found by flooding from the goal back to the player."""
    waves, reached = [goal], goal
    while not reached & player:
        waves.append(neighbours(waves[-1], cols) & free & ~reached)
        reached |= waves[-1]
    cell, steps = player.bit_length() - 1, []
    for wave in reversed(waves[:-1]):
        step = next(step for step in (-cols, cols, -1, 1) if wave >> cell + step & 1)
        steps.append(step)
        cell += step
    return steps
