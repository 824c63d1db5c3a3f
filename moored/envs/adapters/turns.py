"""What the adapters share: the frame of an episode in text, drawing a start, a child process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from moored.envs.base import FORMAT_REMINDER, StepResult, draw_task, split_of_seed
from moored.envs.worker import Worker
from moored.errors import EnvError
from moored.types import Content, Message, TextPart

SHARE_STARTS = "; set fixed_start=True to let all splits share them"
StartT = TypeVar("StartT")


class TextGame:
    """Base of games in text with at most `max_turns` replies."""

    name: ClassVar[str]
    max_turns: int
    malformed_reward: float
    """Of a malformed reply, which changes nothing and uses up the turn."""
    _turn = 0
    _over = True

    def check_options(self, *, max_turns: int, **limits_s: float) -> None:
        """Refuse an episode without turns, and limits in seconds that are not positive."""
        if max_turns < 1:
            raise EnvError(f"{self.name}: max_turns must be at least 1, got {max_turns}")
        for option, limit_s in limits_s.items():
            if limit_s <= 0:
                raise EnvError(f"{self.name}: {option} must be positive, got {limit_s:g}")

    def check_running(self, method: str) -> None:
        """Refuse a call between episodes."""
        if self._over:
            raise EnvError(f"{self.name}: the episode is over; call reset before {method}")

    def open_episode(self, rules: str, shown: Content | None) -> list[Message]:
        """The first messages: the rules of the game, then what the model sees."""
        self._turn, self._over = 0, False
        system = f"{rules}\n{self.malformed_rule()}\n{FORMAT_REMINDER}."
        return [Message("system", system), Message("user", self._turn_content("", shown))]

    def malformed_rule(self) -> str:
        return (
            f"A malformed reply earns {self.malformed_reward:g}, changes nothing and uses up the "
            f"turn."
        )

    def end_turn(
        self,
        reward: float,
        shown: Content | None,
        *,
        closing: str = "",
        terminated: bool = False,
        truncated: bool = False,
        success: bool = False,
        is_valid: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> StepResult:
        """The result of a turn: `shown` comes before the next one, `closing` after the last."""
        # An episode that is over by itself was not cut off, though packages may report both.
        truncated = not terminated and (truncated or self._turn >= self.max_turns)
        self._over = terminated or truncated
        lead = f"{'' if is_valid else 'Malformed reply. '}Reward: {reward:g}."
        end = f"{lead} {'Solved.' if success else 'Game over.'}"
        if self._over:
            observation = f"{end}\n{closing}" if closing else end
        else:
            observation = self._turn_content(f"{lead}\n", shown)
        return StepResult(
            observation=observation,
            reward=reward,
            penalty=0.0 if is_valid else reward,
            terminated=terminated,
            truncated=truncated,
            is_valid=is_valid,
            success=success,
            metrics=metrics or {},
        )

    def _turn_content(self, lead: str, shown: Content | None) -> Content:
        head = f"{lead}Turn {self._turn + 1} of {self.max_turns}.\n"
        tail = f"{FORMAT_REMINDER}."
        if shown is None:
            return f"{head}{tail}"
        if isinstance(shown, str):
            return f"{head}{shown}\n{tail}"
        return [TextPart(type="text", text=head), *shown, TextPart(type="text", text=f"\n{tail}")]


def draw_start(
    task_seed: int,
    begin: Callable[[random.Random], StartT],
    key: Callable[[StartT], str],
    *,
    is_fixed: bool,
    source: str,
    remedy: str = "",
) -> StartT:
    """A start of the seed's split; where all starts look alike, the splits share them."""
    split = split_of_seed(task_seed)
    if is_fixed:
        return begin(random.Random(task_seed))
    try:
        return draw_task(task_seed, begin, key)[0]
    except EnvError as error:
        if "task space" not in str(error):
            raise
        text = f"{source} has too few starts for a {split} split{remedy}"
        raise EnvError(text) from error


class PackageChild:
    """A child process in which a package runs that shares global state, or never ends."""

    def __init__(self, name: str, module: str) -> None:
        self._name = name
        self._worker = Worker(
            f"{module}:answer_request",
            prepare=f"{module}:import_package",
            memory_bytes=8 << 30,
            environ={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )

    def ask(self, limit_s: float, *request: object) -> Any:
        """What the module's `answer_request` returns; errors begin with the adapter's name."""
        try:
            return self._worker.ask(*request, wall_s=limit_s)
        except EnvError as error:
            raise EnvError(f"{self._name}: {error}") from error
