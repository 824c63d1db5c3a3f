"""Good answers for some games of TextArena, from the state of the game.

Each takes TextArena's `game_state` and the number of the player, and returns an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LINES = (
    *((row, row + 1, row + 2) for row in (0, 3, 6)),
    *((column, column + 3, column + 6) for column in range(3)),
    (0, 4, 8),
    (2, 4, 6),
)


def cross_lake(state: dict[str, Any], player: int) -> str:
    """FrozenLake: the first move of a shortest way to the goal, around the holes."""
    grid, start = state["grid"], tuple(state["player_pos"])
    first_moves: dict[tuple[int, int], str] = {start: ""}
    queue = deque([start])
    while queue:
        place = queue.popleft()
        if grid[place[0]][place[1]] == "G":
            return f"[{first_moves[place]}]"
        for name, (down, right) in MOVES.items():
            row, column = there = place[0] + down, place[1] + right
            is_inside = 0 <= row < len(grid) and 0 <= column < len(grid)
            if is_inside and grid[row][column] != "H" and there not in first_moves:
                first_moves[there] = first_moves[place] or name
                queue.append(there)
    return "[up]"


def tell_number(state: dict[str, Any], player: int) -> str:
    """GuessTheNumber: the number."""
    return f"[{state['game_number']}]"


def place_mark(state: dict[str, Any], player: int) -> str:
    """TicTacToe: the move with the best outcome against perfect play."""
    own, other = ("X", "O") if player == 1 else ("O", "X")
    board = tuple(cell for row in state["board"] for cell in row)
    moves = (cell for cell in range(9) if not board[cell])
    # A sure win or draw first; of equal moves the one that leaves a careless opponent most losses.
    best = max(moves, key=lambda cell: (*_after(board, cell, own, other), -cell))
    return f"[{best}]"


def _after(board: tuple[str, ...], cell: int, own: str, other: str) -> tuple[int, float]:
    """Outcome of a move against perfect play, and its mean against random play."""
    after = (*board[:cell], own, *board[cell + 1 :])
    worst, mean = _judge(after, other, own)
    return -worst, -mean


@lru_cache(maxsize=8192)
def _judge(board: tuple[str, ...], mover: str, other: str) -> tuple[int, float]:
    """For the player to move: 1, 0 or −1 in perfect play, and the mean if the mover plays randomly.

    After a random move the other side again plays its best.
    """
    if _has_line(board, other):
        return -1, -1.0
    free = [cell for cell in range(9) if not board[cell]]
    if not free:
        return 0, 0.0
    outcomes = [_after(board, cell, mover, other) for cell in free]
    return max(outcomes)[0], sum(mean for _, mean in outcomes) / len(free)


def _has_line(board: Sequence[str], mark: str) -> bool:
    return any(all(board[cell] == mark for cell in line) for line in LINES)


ORACLES: dict[str, Callable[[dict[str, Any], int], str]] = {
    "FrozenLake": cross_lake,
    "GuessTheNumber": tell_number,
    "TicTacToe": place_mark,
}
"""Oracles by the name of a game, without its version."""
