"""Games of the TextArena package, for one player or against an opponent of two.

The package runs in a child process (`textarena_worker`): it draws from Python's global generator,
which is the run's own here, and a game that never ends on some answer can be killed there.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moored.envs.adapters.textarena_worker import GameSpec, Start, View
from moored.envs.adapters.turns import PackageChild, TextGame
from moored.envs.base import StepResult, malformed_reward
from moored.envs.worker import WorkerLost
from moored.errors import EnvError, require_packages
from moored.reply import parse_reply
from moored.types import Message

MAX_ANSWER_CHARS = 1000
START_LIMIT_S = 60.0
"""For a start: some games search for a puzzle that can be solved."""

_CHILD = PackageChild("textarena", "moored.envs.adapters.textarena_worker")


class TextArena(TextGame):
    """A game of TextArena: alone, or against an opponent (needs `moored[textarena]`).

    Reward: the game's own for the player, at its end: from 0 to 1 in games for one, 1 for a win, 0
    for a draw and −1 for a loss in games for two; `format_penalty` for a malformed reply. Success
    is a reward of at least 1. The end of a game, its own limit of turns included, terminates the
    episode; `max_turns` truncates it, with the reward 0 for the unfinished game.

    Options:
        id ("FrozenLake-v0"): a game of TextArena's list, such as "GuessTheNumber-v0",
            "Sokoban-v0", "LightsOut-v0", "TicTacToe-v0", "ConnectFour-v0", "KuhnPoker-v0".
        config: keywords of that game, such as {"size": 5}.
        opponent ("random"): of a game for two. "random" draws from the legal moves that the game
            shows in square brackets; a list of moves draws from those; one move is always given;
            "module:name" is a function (text the opponent sees, random.Random) -> move.
        player (0): which player the model is in a game for two.
        max_turns (20): replies in an episode.
        is_stochastic (False): True lets each episode draw its own chance and opponent's moves;
            False has them depend on the task and the replies alone.
        time_limit_s (5.0): a game that takes longer over an answer is stopped (not on Windows).
        format_penalty (None): reward of a malformed reply, which changes nothing in the game. None:
            −0.1, and −1, as for a loss, in a game for two.

    An illegal move is answered by the game, which forgives one and ends at the next (metric
    `invalid_moves`). A game that fails or hangs on an answer is over, with the reward 0
    (`game_errors`, `game_timeouts`). `oracle` knows FrozenLake, GuessTheNumber and TicTacToe.
    """

    name: ClassVar[str] = "textarena"
    main_option: ClassVar[str] = "id"

    def __init__(
        self,
        *,
        id: str = "FrozenLake-v0",
        config: Mapping[str, object] | None = None,
        opponent: str | Sequence[str] = "random",
        player: int = 0,
        max_turns: int = 20,
        is_stochastic: bool = False,
        time_limit_s: float = 5.0,
        format_penalty: float | None = None,
    ) -> None:
        self.check_options(max_turns=max_turns, time_limit_s=time_limit_s)
        if not opponent:
            raise EnvError("textarena: opponent must name at least one move, got none")
        require_packages("environment textarena", ("textarena",))
        self.max_turns = max_turns
        self.is_stochastic = is_stochastic
        self.time_limit_s = time_limit_s
        self.format_penalty = format_penalty
        self._spec = GameSpec(
            id=id,
            config=pickle.dumps(sorted((config or {}).items())),
            opponent=opponent if isinstance(opponent, str) else tuple(opponent),
            player=player,
        )

    def check_available(self) -> None:
        self._ask_for_start("check", self._spec)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        start: Start = self._ask_for_start("draw", self._spec, task_seed)
        episode = episode_seed if self.is_stochastic else "every"
        self._episode = self._spec, start.seed, f"{start.seed} {episode}"
        price = 1.0 if start.num_players > 1 else 0.0  # of a lost game
        self.malformed_reward = malformed_reward(self.format_penalty, price)
        self._answers: tuple[str, ...] = ()
        rules = (
            f"You play {self._spec.id}. Between the answer tags write your move alone, as the "
            f"game asks for it. You have at most {self.max_turns} turns."
        )
        return self.open_episode(rules, start.text or None)

    def step(self, reply: str) -> StepResult:
        self.check_running("step")
        answer = parse_reply(reply).answer
        self._turn += 1
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return self._finish(View("", False, self.malformed_reward, False), is_valid=False)
        self._answers = (*self._answers, answer)
        try:
            view: View = _CHILD.ask(self.time_limit_s, "play", *self._episode, self._answers)
        except WorkerLost as lost:
            is_late = lost.is_late
            return self._finish(
                View("The game did not answer.", True, 0.0, False, has_failed=not is_late), is_late
            )
        return self._finish(view)

    def oracle(self) -> str:
        self.check_running("oracle")
        return _CHILD.ask(START_LIMIT_S, "oracle", *self._episode, self._answers)

    def close(self) -> None:
        self._over = True

    def _ask_for_start(self, request: str, *arguments: object) -> Any:
        try:
            return _CHILD.ask(START_LIMIT_S, request, *arguments)
        except WorkerLost as lost:
            raise EnvError(f"textarena: {self._spec.id} could not be started: {lost}") from lost

    def _finish(self, view: View, is_late: bool = False, *, is_valid: bool = True) -> StepResult:
        return self.end_turn(
            view.reward,
            view.text or None,
            closing=view.text.rstrip(),
            terminated=view.is_over,
            success=view.is_over and view.reward >= 1.0,
            is_valid=is_valid,
            metrics={
                "invalid_moves": float(view.is_invalid_move),
                "game_errors": float(view.has_failed),
                "game_timeouts": float(is_late),
            },
        )
