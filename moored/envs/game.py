"""Games played by naming one or several actions per turn: Sokoban, FrozenLake, 2048, Rubik's cube.

`Game` owns the turn protocol (parsing, limits, penalties, prompt frame); a subclass owns the
board: how a task is drawn, what an action does, what the model sees.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

from moored.envs.base import (
    FORMAT_REMINDER,
    SPLIT_SEEDS,
    StepResult,
    draw_task,
    malformed_reward,
)
from moored.errors import EnvError
from moored.reply import parse_actions, parse_reply
from moored.types import Content, Message, TextPart

TaskT = TypeVar("TaskT")
KEPT_TASKS = 1024
_drawn_tasks: dict[Hashable, Any] = {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one action led to."""

    reward: float
    terminated: bool = False
    """True when the game itself is over: solved, or lost."""
    success: bool = False
    changed: bool = True
    """False when the action had no effect, e.g. a push against a wall."""


NO_ACTION = Outcome(0.0, changed=False)


class Limits(TypedDict, total=False):
    """Options that all games have; `Game` says what they are by default."""

    max_turns: int
    max_actions: int
    max_actions_per_turn: int
    format_penalty: float | None


class Game(ABC, Generic[TaskT]):
    """Base of action games. Subclasses set the class attributes and the abstract methods.

    An episode is terminated when an action ends the game (solved, or lost) and truncated when the
    turns or actions run out first: the board could have gone on, so its value is not 0.

    A malformed reply costs what the dearest valid turn of the task may cost, at least 0.1;
    `format_penalty` sets its reward by hand (-0.1 is RAGEN's rule, whatever the moves cost).
    """

    name: ClassVar[str]
    is_stochastic: bool = False
    actions: tuple[str, ...]
    """Names a reply may use; upper and lower case are the same."""

    def __init__(
        self,
        *,
        max_turns: int = 5,
        max_actions: int = 10,
        max_actions_per_turn: int = 2,
        format_penalty: float | None = None,
    ) -> None:
        limits = {
            "max_turns": max_turns,
            "max_actions": max_actions,
            "max_actions_per_turn": max_actions_per_turn,
        }
        for option, value in limits.items():
            if value < 1:
                raise EnvError(f"{self.name}: {option} must be at least 1, got {value}")
        self.max_turns = max_turns
        self.max_actions = max_actions
        self.max_actions_per_turn = max_actions_per_turn
        self.format_penalty = format_penalty
        self._over = True

    @abstractmethod
    def rules(self) -> str:
        """System prompt: the goal, the symbols, what each action does, the rewards."""

    @abstractmethod
    def make_task(self, rng: random.Random) -> TaskT:
        """Draw one solvable task."""

    @abstractmethod
    def task_key(self, task: TaskT) -> str:
        """Text that two tasks share exactly when they are the same task."""

    def task_options(self) -> Hashable | None:
        """What a task depends on besides its seed; None: unknown, it is drawn every time."""
        return None

    @abstractmethod
    def start(self, task: TaskT, noise: random.Random) -> None:
        """Set up the board; `noise` is this episode's own randomness."""

    @abstractmethod
    def act(self, action: str) -> Outcome:
        """Apply one action."""

    @abstractmethod
    def state(self) -> Content:
        """The board as the model sees it."""

    @abstractmethod
    def plan(self) -> list[str]:
        """Good actions from here on; empty when none is known."""

    def dearest_turn(self) -> float:
        """The most that a valid turn of the task may cost, 0 or more; asked after `start`."""
        return 0.0

    def parse(self, answer: str) -> list[str] | None:
        """Actions named in the answer; None when it is malformed."""
        return parse_actions(answer, self.actions)

    def action_text(self) -> str:
        """How the prompt names the actions."""
        return ", ".join(self.actions)

    @property
    def action_budget(self) -> int:
        """Actions an episode can hold: the limit, or all turns filled, whichever is less."""
        return min(self.max_actions, self.max_turns * self.max_actions_per_turn)

    @property
    def turn_budget(self) -> int:
        """Actions that a turn can hold."""
        return min(self.max_actions_per_turn, self.max_actions)

    @property
    def actions_left(self) -> int:
        """Actions the rest of the episode can hold: a used turn's unused actions are lost."""
        turns_left = self.max_turns - self._turn
        return min(self._actions_left, turns_left * self.max_actions_per_turn)

    def check_available(self) -> None:
        """Draw a task: options that allow none are refused before a run, not in every episode."""
        if self._fixed_task() is None:
            self._drawn_task(SPLIT_SEEDS["train"].start)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        task = self._fixed_task()
        if task is None:
            task = self._drawn_task(task_seed)
        # Noise has its own stream, another one in every task: a stream shared between tasks would
        # make their outcomes move together, and one seeded like the board would give it away.
        self.start(task, random.Random(f"noise {task_seed} {episode_seed}"))
        self._turn = 0
        self._actions_left = self.max_actions
        self._over = False
        return [Message("system", self._system_text()), Message("user", self._turn_content(""))]

    def _drawn_task(self, task_seed: int) -> TaskT:
        """The episodes of a group ask for the same task one after another: draw it once."""
        options = self.task_options()
        key = type(self), options, task_seed
        # `get`, not `in` and then `[]`: another thread may clear the tasks in between.
        task = None if options is None else _drawn_tasks.get(key)
        if task is not None:
            return task
        task, _ = draw_task(task_seed, self.make_task, self.task_key)
        if options is not None:
            if len(_drawn_tasks) >= KEPT_TASKS:
                _drawn_tasks.clear()
            _drawn_tasks[key] = task
        return task

    def step(self, reply: str) -> StepResult:
        self._check_running("step")
        answer = parse_reply(reply).answer
        actions = None if answer is None else self.parse(answer)
        self._turn += 1
        if actions is None:
            return self._finish(self._malformed_reward(), NO_ACTION, [], valid=False)
        reward, outcome, changed = 0.0, NO_ACTION, []
        for action in actions[: min(self.max_actions_per_turn, self._actions_left)]:
            outcome = self.act(action)
            reward += outcome.reward
            self._actions_left -= 1
            changed.append(outcome.changed)
            if outcome.terminated:
                break
        return self._finish(reward, outcome, changed, valid=True)

    def oracle(self) -> str:
        self._check_running("oracle")
        plan = self.plan()[: min(self.max_actions_per_turn, self._actions_left)]
        return " || ".join(plan)

    def guess(self, rng: random.Random) -> str:
        """Any actions, as many as fit the turn or fewer."""
        self._check_running("guess")
        most = min(self.max_actions_per_turn, self.actions_left)
        return " || ".join(rng.choices(self.actions, k=rng.randint(1, most)))

    def spoil(self, answer: str, chance: float, rng: random.Random) -> str:
        """Replace each action by a random one with probability `chance`."""
        actions = answer.split(" || ")
        return " || ".join(
            rng.choice(self.actions) if rng.random() < chance else a for a in actions
        )

    def close(self) -> None:
        self._over = True

    def _check_running(self, method: str) -> None:
        if self._over:
            raise EnvError(
                f"{self.name}: the episode is over or was not begun; call reset before {method}"
            )

    def _malformed_reward(self) -> float:
        return malformed_reward(self.format_penalty, self.dearest_turn())

    def _fixed_task(self) -> TaskT | None:
        """The one task of an environment that was given its board; None when boards are drawn."""
        return None

    def _finish(
        self, reward: float, outcome: Outcome, changed: list[bool], *, valid: bool
    ) -> StepResult:
        out_of_turns = self._turn >= self.max_turns or self._actions_left <= 0
        self._over = outcome.terminated or out_of_turns
        result = f"Reward: {reward:g}." if valid else f"Malformed reply. Reward: {reward:g}."
        if self._over:
            result += " Solved.\n" if outcome.success else " Game over.\n"
            observation = _framed(result, self.state(), "")
        else:
            observation = self._turn_content(result + "\n")
        return StepResult(
            observation=observation,
            reward=reward,
            penalty=0.0 if valid else reward,
            terminated=outcome.terminated,
            truncated=self._over and not outcome.terminated,
            is_valid=valid,
            success=outcome.success,
            metrics={
                "num_actions": float(len(changed)),
                "num_effective_actions": float(sum(changed)),
            },
        )

    def _system_text(self) -> str:
        return (
            f"{self.rules()}\n"
            f"Actions: {self.action_text()}. Give at most {self.max_actions_per_turn} "
            f"a turn, joined by ' || ', at most {self.action_budget} in all, in at most "
            f"{self.max_turns} turns. Further actions are ignored.\n"
            f"A malformed reply earns {self._malformed_reward():g}, moves nothing and uses up the "
            f"turn.\n{FORMAT_REMINDER}."
        )

    def _turn_content(self, lead: str) -> Content:
        head = f"{lead}Turn {self._turn + 1} of {self.max_turns}.\n"
        left = self.actions_left
        allowed = min(self.max_actions_per_turn, left)
        tail = f"\nActions left: {left}, at most {allowed} this turn.\n{FORMAT_REMINDER}."
        return _framed(head, self.state(), tail)


def _framed(head: str, state: Content, tail: str) -> Content:
    if isinstance(state, str):
        return f"{head}{state}{tail}"
    frame = [TextPart(type="text", text=text) for text in (head, tail) if text]
    return [frame[0], *state, *frame[1:]]
