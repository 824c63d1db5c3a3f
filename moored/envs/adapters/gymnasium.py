"""Any gymnasium environment, played in text.

In: an environment id or factory, and functions that turn observations into text and text into
actions. Out: a moored environment whose task seed fixes the start and whose episode seed drives
the noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moored.envs.adapters.turns import SHARE_STARTS, TextGame, draw_start
from moored.envs.base import StepResult, malformed_reward
from moored.errors import EnvError, require_packages
from moored.names import import_object
from moored.reply import parse_actions, parse_reply
from moored.types import Content, Message, messages_digest

if TYPE_CHECKING:
    import gymnasium

MAX_ANSWER_CHARS = 4096
NUM_PROBES = 16
"""Resets that find out whether all starts are equal."""
DISCOUNT = 0.999
"""Makes the built-in oracle prefer the sooner of two equal rewards."""


Start = tuple[int, Content]
"""The seed that leads to a start state, and what the model sees of it."""


class GymnasiumEnv(TextGame):
    """Any gymnasium environment in text, one action per reply (needs `moored[gym]`).

    Reward: the environment's own; `format_penalty` for a malformed reply, which changes nothing and
    uses up the turn. An episode is terminated when the environment says so, and truncated when the
    environment says so or `max_turns` is reached first.

    A task is a start state: `task_seed` seeds `reset`. The environment's generator `np_random` is
    then replaced by one made from the start's seed and `episode_seed`, so the members of a group
    start alike and each draws its own noise. A simulator that draws from another generator must
    do that itself.

    Options:
        env: an id for `gymnasium.make` ("FrozenLake-v1"), or a function that makes one.
        make_options: keywords for `gymnasium.make` or that function.
        to_text (str): observation -> text, or a list of text and image parts.
        to_action: answer -> action; None or a ValueError means malformed. By default the number
            of a discrete action; a list of names, in the order of the numbers, is enough too.
        rules: the system prompt: goal, observations, actions, rewards.
        max_turns (20): replies in an episode.
        success: (total reward, terminated, info) -> bool, asked at the end. By default: the
            episode terminated with a positive total.
        oracle: gymnasium environment -> a good answer. By default planned from the transition
            table `P` where there is one (FrozenLake, Taxi, CliffWalking).
        fixed_start: True when all seeds start alike; train, validation and test then cannot be
            kept apart and share the one task. None (default) finds out by 16 resets.
        is_stochastic (True): False for an environment without noise after its start.
        format_penalty (None): reward of a malformed reply. None: that of the dearest step in the
            table `P`, and at most −0.1. Without a table −0.1: where steps cost more, set it to at
            most that of the dearest; `moored check-env` compares them.

    A function may be given as "module:name". To be pickled it must stand at the top of a module;
    a pickled copy makes the environment again and replays the actions of the episode.
    """

    name: ClassVar[str] = "gymnasium"
    main_option: ClassVar[str] = "env"

    def __init__(
        self,
        *,
        env: str | Callable[..., gymnasium.Env] = "FrozenLake-v1",
        make_options: Mapping[str, object] | None = None,
        to_text: str | Callable[..., Content] = str,
        to_action: str | Sequence[str] | Callable[[str], object] | None = None,
        rules: str = "",
        max_turns: int = 20,
        success: str | Callable[[float, bool, dict], bool] | None = None,
        oracle: str | Callable[..., str] | None = None,
        fixed_start: bool | None = None,
        is_stochastic: bool = True,
        format_penalty: float | None = None,
    ) -> None:
        self.check_options(max_turns=max_turns)
        if isinstance(env, str):
            require_packages("environment gymnasium", ("gymnasium",))
        self.max_turns = max_turns
        self.is_stochastic = is_stochastic
        self.format_penalty = format_penalty
        self._source = env
        self._make_options = dict(make_options or {})
        self._rules = rules
        self._fixed_start = fixed_start
        self._action_names: tuple[str, ...] = ()
        self._to_action = None
        if isinstance(to_action, Sequence) and not isinstance(to_action, str):
            self._action_names = tuple(to_action)
        elif to_action is not None:
            self._to_action = _load("to_action", to_action)
        self._to_text = _load("to_text", to_text)
        self._success = _load("success", success or _has_won)
        self._oracle = None if oracle is None else _load("oracle", oracle)
        self._env: gymnasium.Env | None = None

    def check_available(self) -> None:
        self._living_env()

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        start_seed, self._content = self._draw_start(task_seed)
        self._seeds = start_seed, episode_seed
        self._seed_noise()
        self._played: list[object] = []
        self._info: dict = {}
        self._total = 0.0
        return self.open_episode(self._rules_text(), self._content)

    def step(self, reply: str) -> StepResult:
        self.check_running("step")
        env = self._living_env()
        action = self._read_action(env, parse_reply(reply).answer)
        self._turn += 1
        if action is None:
            return self._finish(self.malformed_reward, is_valid=False)
        observation, reward, terminated, truncated, self._info = env.step(action)
        self._played.append(action)
        self._total += float(reward)
        self._content = self._to_text(observation)
        return self._finish(float(reward), terminated=bool(terminated), truncated=bool(truncated))

    def oracle(self) -> str:
        self.check_running("oracle")
        env = self._living_env()
        if self._oracle is not None:
            return self._oracle(env)
        table, state = (getattr(env.unwrapped, name, None) for name in ("P", "s"))
        if table is None or state is None or self._to_action is not None:
            raise EnvError(
                f"gymnasium: no good answer is known for {self._env_name()}; give oracle=, a "
                f"function from the gymnasium environment to the text of an answer"
            )
        action = best_action(table, int(state), self.max_turns - self._turn)
        return self._action_names[action] if self._action_names else str(action)

    def close(self) -> None:
        self._over = True
        if self._env is not None:
            self._env.close()
            self._env = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_env": None, "_info": {}}

    def _living_env(self) -> gymnasium.Env:
        """The gymnasium environment; a pickled copy makes it again and replays the episode."""
        if self._env is None:
            self._env = self._make()
            if not self._over:
                self._env.reset(seed=self._seeds[0])
                self._seed_noise()
                for action in self._played:
                    *_, self._info = self._env.step(action)
        return self._env

    def _make(self) -> gymnasium.Env:
        if callable(self._source):
            env = self._source(**self._make_options)
        else:
            env = _make_by_id(self._source, self._make_options)
        if self._to_action is None:
            self._check_discrete(env.action_space)
        price = dearest_step(getattr(env.unwrapped, "P", None) or {})
        self.malformed_reward = malformed_reward(self.format_penalty, price)
        return env

    def _check_discrete(self, space: gymnasium.Space) -> None:
        size = getattr(space, "n", None)
        if size is None or getattr(space, "start", None) is None:
            raise EnvError(
                f"gymnasium: {self._env_name()} takes actions in {space}; give to_action=, a "
                f"function from the answer's text to an action"
            )
        if self._action_names and len(self._action_names) != size:
            raise EnvError(
                f"gymnasium: {self._env_name()} has {size} actions, but to_action names "
                f"{len(self._action_names)}"
            )

    def _draw_start(self, task_seed: int) -> Start:
        if self._fixed_start is None:
            starts = {_digest(self._start(random.Random(seed))) for seed in range(NUM_PROBES)}
            self._fixed_start = len(starts) == 1
        return draw_start(
            task_seed,
            self._start,
            _digest,
            is_fixed=self._fixed_start,
            source=f"gymnasium: {self._env_name()}",
            remedy=SHARE_STARTS,
        )

    def _start(self, rng: random.Random) -> Start:
        seed = rng.getrandbits(31)
        observation, _ = self._living_env().reset(seed=seed)
        return seed, self._to_text(observation)

    def _seed_noise(self) -> None:
        # Both seeds: episode 3 of one task must not draw the noise of episode 3 of another.
        self._living_env().unwrapped.np_random = np.random.default_rng(self._seeds)

    def _read_action(self, env: gymnasium.Env, answer: str | None) -> object | None:
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return None
        try:
            read = self._to_action or self._read_discrete
            action = read(answer)
        except (ValueError, RecursionError):  # int("up"), json.loads("[[[[…")
            return None
        return None if action is None or not env.action_space.contains(action) else action

    def _read_discrete(self, answer: str) -> int | None:
        if not self._action_names:
            return int(answer)
        named = parse_actions(answer, self._action_names)
        return self._action_names.index(named[0]) if named and len(named) == 1 else None

    def _finish(
        self,
        reward: float,
        *,
        is_valid: bool = True,
        terminated: bool = False,
        truncated: bool = False,
    ) -> StepResult:
        is_over = terminated or truncated or self._turn >= self.max_turns
        return self.end_turn(
            reward,
            self._content,
            terminated=terminated,
            truncated=truncated,
            success=is_over and bool(self._success(self._total, terminated, self._info)),
            is_valid=is_valid,
        )

    def _rules_text(self) -> str:
        env = self._living_env()
        rules = self._rules or f"You play {self._env_name()}; you see {env.observation_space}."
        if self._action_names:
            rules += f"\nActions: {', '.join(self._action_names)}."
        elif self._to_action is None:
            rules += f"\nActions: the numbers of {env.action_space}."
        return f"{rules}\nGive one action a turn, in at most {self.max_turns} turns."

    def _env_name(self) -> str:
        return str(getattr(self._source, "__name__", self._source))


def best_action(
    table: Mapping[int, Mapping[int, Sequence[tuple]]], state: int, horizon: int
) -> int:
    """The action with the largest expected reward over `horizon` steps, by value iteration.

    `table[state][action]` lists (probability, next state, reward, terminated), as gymnasium's toy
    texts give it.
    """
    values = dict.fromkeys(table, 0.0)

    def gain(outcomes: Sequence[tuple]) -> float:
        return sum(
            chance * (reward + (0.0 if over else DISCOUNT * values[after]))
            for chance, after, reward, over in outcomes
        )

    for _ in range(horizon - 1):
        values = {s: max(map(gain, moves.values())) for s, moves in table.items()}
    moves = table[state]
    return max(moves, key=lambda action: gain(moves[action]))


def dearest_step(table: Mapping[int, Mapping[int, Sequence[tuple]]]) -> float:
    """The most that a step may cost by gymnasium's table, 0 or more."""
    steps = (step for moves in table.values() for outcomes in moves.values() for step in outcomes)
    return max((-float(reward) for _, _, reward, _ in steps), default=0.0)


def _has_won(total: float, terminated: bool, info: dict) -> bool:
    return terminated and total > 0


def _load(option: str, function: str | Callable) -> Callable:
    """A function as it is, or imported from "module:name"."""
    found: Any = import_object(function, kind=option) if isinstance(function, str) else function
    return found


def _digest(start: Start) -> str:
    return messages_digest([Message("user", start[1])])


def _make_by_id(env_id: str, options: Mapping[str, object]) -> gymnasium.Env:
    import gymnasium

    # The checker's warnings are for those who write the simulator.
    keywords: dict = {"disable_env_checker": True, **options}
    try:
        return gymnasium.make(env_id, **keywords)
    except gymnasium.error.Error as error:
        raise EnvError(f"gymnasium cannot make {env_id!r}: {error}") from error
