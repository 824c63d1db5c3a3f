"""Any gymnasium environment, played in text.

In: an environment id or factory, and three user functions (observation to text, text to action,
success). Out: a moored environment whose task seed fixes the start and whose episode seed
drives the noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moored.envs.base import FORMAT_REMINDER, StepResult, draw_task, parse_actions, parse_reply
from moored.errors import EnvError
from moored.registry import import_object
from moored.types import Content, Message, TextPart, messages_digest

if TYPE_CHECKING:
    import gymnasium

MAX_ANSWER_CHARS = 4096
NUM_START_PROBES = 16


class GymnasiumEnv:
    """Any gymnasium environment in text, one action a reply.

    A task is a start state: `task_seed` seeds the first `reset`. The environment's own generator
    (`np_random`) is then replaced by one made from `episode_seed`, so that the members of a group
    start alike and draw their own noise. Rewards are the environment's; a malformed reply costs
    `format_penalty`, changes nothing and uses up the turn. Termination and truncation both end
    the episode.

    Options:
        env: an id for `gymnasium.make`, or a function that returns an environment.
        to_text: observation -> text, or a list of text and image parts.
        to_action: answer text -> action; None or a ValueError means malformed. For discrete
            actions a list of names, in the order of their numbers, is enough.
        rules: the system prompt: the goal, the symbols, what actions do, the rewards.
        max_turns (20): replies in an episode.
        success: (total reward, terminated, info) -> bool, asked once at the end; by default a
            terminated episode with a positive total.
        oracle: gymnasium environment -> a good answer for its present state.
        fixed_start: True when every seed gives the same start; such tasks cannot be kept apart,
            so train, validation and test share them. None (default) finds out by 16 resets.
        make_options: keywords for `gymnasium.make` or the factory.
        format_penalty (-0.1): reward of a malformed reply.

    Functions may also be given as "module:attribute". To pickle the environment they must be
    module-level functions; a copy replays the episode's actions and goes on from there.
    """

    name: ClassVar[str] = "gymnasium"
    is_stochastic: ClassVar[bool] = True

    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env],
        *,
        to_text: Callable[..., Content] | str,
        to_action: Callable[[str], object] | Sequence[str] | str,
        rules: str,
        max_turns: int = 20,
        success: Callable[[float, bool, dict], bool] | str | None = None,
        oracle: Callable[[gymnasium.Env], str] | str | None = None,
        fixed_start: bool | None = None,
        make_options: Mapping[str, object] | None = None,
        format_penalty: float = -0.1,
    ) -> None:
        if max_turns < 1:
            raise EnvError(f"gymnasium: max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns
        self.format_penalty = format_penalty
        self.rules = rules
        self.fixed_start = fixed_start
        self.make_options = dict(make_options or {})
        self.actions: tuple[str, ...] = ()
        if not isinstance(to_action, str) and isinstance(to_action, Sequence):
            self.actions = tuple(to_action)
            to_action = self._action_by_name
        self._source = env if isinstance(env, str) else _load("env", env)
        self._to_text = _load("to_text", to_text)
        self._to_action = _load("to_action", to_action)
        self._success = _load("success", success or _has_won)
        self._oracle = None if oracle is None else _load("oracle", oracle)
        self._env: gymnasium.Env | None = None
        self._over = True

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        if self.fixed_start is None:
            digests = {_digest(self._start(seed)) for seed in range(NUM_START_PROBES)}
            self.fixed_start = len(digests) == 1
        rng = random.Random(task_seed)
        # Older simulators take 32-bit signed seeds only.
        start_seed = rng.getrandbits(31)
        if self.fixed_start:
            start = self._start(start_seed)
        else:
            start_seed, _ = draw_task(task_seed, lambda rng: rng.getrandbits(31), self._start_key)
            start = self._start(start_seed)
        self._seeds = start_seed, episode_seed
        self._seed_noise(episode_seed)
        self._played: list[object] = []
        self._turn = 0
        self._total = 0.0
        self._info: dict = {}
        self._over = False
        return [Message("system", self._system_text()), Message("user", self._turn(start))]

    def step(self, reply: str) -> StepResult:
        if self._over:
            raise EnvError("gymnasium: the episode is over; call reset before step")
