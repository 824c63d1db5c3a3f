"""What the other player of a TextArena game answers.

In: the game, what it shows that player, and a generator. Out: a move as text.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from moored.errors import EnvError
from moored.names import import_object

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
FUNCTION = re.compile(r"[\w.]+:\w+")


def choose_move(
    env: Any, opponent: str | tuple[str, ...], seen: Sequence[Any], rng: random.Random
) -> str:
    """A move of the opponent that the environment's option `opponent` describes."""
    if isinstance(opponent, tuple):
        return rng.choice(opponent)
    if opponent == "random":
        return random_move(env, seen, rng)
    if FUNCTION.fullmatch(opponent):
        text = "\n".join(text for _, text, _ in seen)
        return str(_load(opponent)(text, rng))
    return opponent


@lru_cache(maxsize=16)
def _load(path: str) -> Callable[[str, random.Random], object]:
    function: Any = import_object(path, kind="opponent")
    return function


def random_move(env: Any, seen: Sequence[Any], rng: random.Random) -> str:
    """A random move out of those in square brackets in what the game shows, tried on a copy."""
    moves = sorted({move for _, text, _ in seen for move in MOVE.findall(text)})
    rng.shuffle(moves)
    state = random.getstate()
    for move in moves:
        is_legal = _is_legal(env, move)
        random.setstate(state)
        if is_legal:
            return move
    raise EnvError(
        f"{env.env_id.removesuffix('-raw')} shows the opponent no legal move in square brackets; "
        f"set the option opponent to a list of moves, or to a function 'module:name'"
    )


def _is_legal(env: Any, move: str) -> bool:
    trial = copy.deepcopy(env)
    player = trial.state.current_player_id
    trial.state.error_allowance = 0
    try:
        trial.step(move)
    except Exception:  # a move on which the game fails cannot be played
        return False
    return not trial.state.game_info[player].get("invalid_move")
