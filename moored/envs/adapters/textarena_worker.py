"""The side of the textarena adapter that runs in a child process, where TextArena is imported.

In: a game, the seeds of an episode, and the answers so far. Out: what the player sees and earns.
TextArena draws from Python's global generator, which this process sets before every call. Nothing
is kept between requests but a cache: an episode that is not in it is played again from its seeds.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moored.envs.adapters.textarena_oracles import ORACLES
from moored.envs.adapters.turns import draw_start
from moored.envs.base import encodable
from moored.errors import EnvError, close_match_hint
from moored.names import import_object

NUM_PROBES = 16
"""Starts that are compared to find out whether all are equal."""
MAX_KEPT_GAMES = 512
MAX_MESSAGE_CHARS = 3000
MAX_OPPONENT_MOVES = 200
"""An opponent that keeps the turn for longer than this ends the episode as an error."""
MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
FUNCTION = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, slots=True)
class GameSpec:
    """Which game is played, and against whom."""

    id: str
    config: bytes
    """Keywords of the game, pickled so that they can be compared and hashed."""
    opponent: str | tuple[str, ...]
    player: int


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a game: the seed that leads to it, and what the player is told."""

    seed: int
    text: str
    num_players: int


@dataclass(frozen=True, slots=True)
class View:
    """What the player sees after an answer."""

    text: str
    is_over: bool
    reward: float
    """The game's reward for the player, 0 while it goes on."""
    is_invalid_move: bool
    has_failed: bool = False
    """The game itself raised an exception over the answer."""


@dataclass(slots=True)
class Game:
    """A game in progress, with the state of the generators it draws from."""

    spec: GameSpec
    env: Any
    num_players: int
    opponent_rng: random.Random
    random_state: object = None
    messages: list[tuple[int, str, str]] = field(default_factory=list)
    """Sender, text and type of what the player has been shown since its last answer."""
    is_over: bool = False

    @property
    def player(self) -> int:
        return self.spec.player if self.num_players > 1 else 0


def import_package() -> None:
    """Import TextArena before the first request; no process of a game needs to do it again."""
    # nltk, which has its lists of words, also imports these where they are installed, for
    # statistics that no game asks for: a second, and a hundred megabytes.
    hidden = [name for name in ("scipy", "sklearn") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue]
    with contextlib.suppress(ImportError):
        import nltk  # noqa: F401
    for name in hidden:
        del sys.modules[name]
    import textarena.envs  # noqa: F401


def answer_request(request: str, *arguments: Any) -> object:
    """What `Worker.ask` calls: `check` a game, `draw` a start, `play`, or ask the `oracle`."""
    handlers: dict[str, Callable[..., object]] = {
        "check": lambda spec: start_of(spec, 0),
        "draw": draw,
        "play": play,
        "oracle": oracle,
    }
    return handlers[request](*arguments)


def draw(spec: GameSpec, task_seed: int) -> Start:
    """Choose a start for a task seed."""
    return draw_start(
        task_seed,
        lambda rng: start_of(spec, rng.getrandbits(31)),
        lambda start: start.text,
        is_fixed=has_one_start(spec),
        source=spec.id,
    )


@lru_cache(maxsize=64)
def has_one_start(spec: GameSpec) -> bool:
    """True when the first message does not depend on the seed."""
    first = start_of(spec, 0).text
    return all(start_of(spec, seed).text == first for seed in range(1, NUM_PROBES))


@lru_cache(maxsize=1024)
def start_of(spec: GameSpec, seed: int) -> Start:
    """The start that a seed leads to."""
    game = begin(spec, seed)
    return Start(seed, shown(game), game.num_players)


_kept: OrderedDict[tuple, Game] = OrderedDict()


def play(spec: GameSpec, seed: int, noise: str, answers: tuple[str, ...]) -> View:
    """Give the last of `answers` in the episode that the earlier ones led to."""
    game = find_game(spec, seed, noise, answers[:-1])
    try:
        view = take_turn(game, answers[-1])
    except EnvError:
        raise
    except Exception:  # a game's parser on hostile text: the episode is over, the run goes on
        return View("The game failed on this answer.", True, 0.0, False, has_failed=True)
    if not view.is_over:
        keep(game, seed, noise, answers)
    return view


def oracle(spec: GameSpec, seed: int, noise: str, answers: tuple[str, ...]) -> str:
    """A good answer for the present state, where one is known."""
    name = spec.id.partition("-v")[0]
    if name not in ORACLES:
        raise EnvError(
            f"no good answer is known for {spec.id}; there is one for {', '.join(ORACLES)}"
        )
    game = find_game(spec, seed, noise, answers)
    answer = ORACLES[name](game.env.state.game_state, game.player)
    keep(game, seed, noise, answers)
    return answer


def find_game(spec: GameSpec, seed: int, noise: str, answers: tuple[str, ...]) -> Game:
    """The game after `answers`: taken from the cache, or played again."""
    game = _kept.pop((spec, seed, noise, answers), None)
    if game is not None:
        return game
    game = begin(spec, seed)
    game.opponent_rng.seed(f"opponent {noise}")
    random.seed(f"game {noise}")
    game.random_state = random.getstate()
    for answer in answers:
        take_turn(game, answer)
    return game


def keep(game: Game, seed: int, noise: str, answers: tuple[str, ...]) -> None:
    _kept[(game.spec, seed, noise, answers)] = game
    if len(_kept) > MAX_KEPT_GAMES:
        _kept.popitem(last=False)


def begin(spec: GameSpec, seed: int) -> Game:
    """A new game, at the player's first turn."""
    env, num_players = _reset(spec, seed)
    if num_players == 2 and spec.player not in (0, 1):
        raise EnvError(f"{spec.id} has players 0 and 1, got player {spec.player}")
    game = Game(spec, env, num_players, random.Random(f"opponent {seed}"))
    let_others_move(game)
    game.random_state = random.getstate()
    if game.is_over:
        raise EnvError(f"{spec.id} was over before the first turn of player {spec.player}")
    return game


def _reset(spec: GameSpec, seed: int) -> tuple[Any, int]:
    """The game for one player where it is a game for one, else for two."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY as known

    if f"{spec.id}-raw" not in known:
        # Without a version in it, it cannot be one of a game's variants, such as Chess-v0-long.
        kind = r".+" if "-v" in spec.id else r"[^-]+-v\d+"
        names = [
            name
            for name in known
            if re.fullmatch(kind, name) and not name.endswith(("-raw", "-train"))
        ]
        raise EnvError(f"there is no game {spec.id!r}; {close_match_hint(spec.id, names)}")
    problem: Exception | None = None
    for num_players in (1, 2):
        random.seed(seed)  # some games draw in their constructor
        try:
            env: Any = textarena.make(f"{spec.id}-raw", **dict(pickle.loads(spec.config)))
            env.reset(num_players=num_players, seed=seed)
        except Exception as error:
            problem = error
            continue
        if num_players == 2 or isinstance(env.state, textarena.SinglePlayerState):
            return env, num_players
    raise EnvError(_why_not(spec.id, problem)) from problem


def _why_not(game_id: str, problem: Exception | None) -> str:
    """Why a game could not be started, in one sentence."""
    if isinstance(problem, LookupError) and "NLTK" in str(problem).upper():
        resource = re.search(r"Resource '?\W*(\w+)", str(problem))
        name = resource[1] if resource else "all"
        return (
            f"{game_id} needs a word list that has to be downloaded first; "
            f"run: python -m nltk.downloader {name}"
        )
    if isinstance(problem, AssertionError):
        return f"{game_id} is neither for one player nor for two; others are not supported"
    lines = str(problem).strip().splitlines() or [""]
    return f"{game_id} cannot be started: {type(problem).__name__}: {lines[0]}"


def take_turn(game: Game, answer: str) -> View:
    """Give the player's answer, then let the opponent move until it is the player's turn again."""
    random.setstate(game.random_state)  # pyright: ignore[reportArgumentType]
    state = game.env.state
    errors_before = getattr(state, "error_count", 0)
    _step(game, answer)
    is_invalid = bool(state.game_info[game.player].get("invalid_move")) or (
        not game.is_over
        and state.current_player_id == game.player
        and getattr(state, "error_count", 0) > errors_before
    )
    let_others_move(game)
    game.random_state = random.getstate()
    reward = 0.0
    if game.is_over:
        rewards = game.env.close()[0] or {}
        reward = float(rewards.get(game.player, 0.0))
    return View(shown(game), game.is_over, reward, is_invalid)


def let_others_move(game: Game) -> None:
    """Play the opponent's turns, and collect what the player is shown."""
    spec = game.spec
    for _ in range(MAX_OPPONENT_MOVES):
        if game.is_over:
            break
        player, seen = game.env.get_observation()
        if player == game.player:
            game.messages += _messages(seen)
            return
        _step(game, choose_move(game.env, spec.opponent, seen, game.opponent_rng))
    else:
        raise EnvError(f"{spec.id}: the opponent was to move {MAX_OPPONENT_MOVES} times")
    game.messages += _messages(game.env.state.observations.get(game.player, []))


def _step(game: Game, answer: str) -> None:
    game.is_over = bool(game.env.step(answer)[0])


def _messages(seen: Sequence[Any]) -> list[tuple[int, str, str]]:
    return [(sender, text, kind.name) for sender, text, kind in seen]


def shown(game: Game) -> str:
    """The messages since the player's last answer as one text; of several boards the last."""
    messages, game.messages = game.messages, []
    boards = [place for place, (_, _, kind) in enumerate(messages) if kind == "GAME_BOARD"]
    lines = []
    for place, (sender, text, kind) in enumerate(messages):
        is_own = kind == "PLAYER_ACTION" and sender == game.player
        is_old = kind == "GAME_BOARD" and place != boards[-1]
        if is_own or is_old:
            continue
        who = f"Player {sender}: " if kind == "PLAYER_ACTION" else ""
        lines.append(f"{who}{text.strip()[:MAX_MESSAGE_CHARS]}")
    reason = game.env.state.game_info[game.player].get("reason") if game.is_over else None
    closing = [str(reason)[:MAX_MESSAGE_CHARS]] if reason else []
    return encodable("\n".join([*lines, *closing]))


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
        function: Any = import_object(opponent, kind="opponent")
        return str(function(text, rng))
    return opponent


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
