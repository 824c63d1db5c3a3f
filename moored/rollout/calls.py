"""What episodes need of environments, wherever those live.

`EnvCalls` has two implementations: `moored.rollout.pool.EnvPool`, threads of this process, and
`moored.engine.ray.env_pool.ActorPool`, processes of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from moored.envs.answers import begin, respond
from moored.envs.base import Environment, StepResult
from moored.types import Message

Question = tuple[int, int] | str
"""What an environment is asked: the seeds of a task and an episode to begin, or to read a reply."""
Answer = list[Message] | StepResult | Exception
"""What it returned or raised."""
Answers = list[tuple[Any, Answer]]
"""Each with the key of its question."""


class Played(Protocol):
    """An environment as an episode sees it."""

    @property
    def max_turns(self) -> int: ...


E = TypeVar("E", bound=Played)


class EnvCalls(Protocol[E]):
    """Hands out environments and carries questions to them. What one raises is data, and so is an
    `EnvTimeoutError` for a question that takes too long. Methods are called from one thread at a
    time.
    """

    def take(self, make_env: Callable[[], Environment]) -> E:
        """An environment for one episode; what another has given back is used again."""
        ...

    def give_back(self, make_env: Callable[[], Environment], env: E) -> None:
        """Keep an environment for the next episode."""
        ...

    def discard(self, env: E) -> None:
        """Close an environment that may be broken."""
        ...

    def ask(self, questions: Sequence[tuple[int, E, Question]]) -> None:
        """Begin to answer questions, each with its key and the environment it is for.

        `poll` gives the answers under these keys. An environment is asked one thing at a time.
        """
        ...

    def poll(self, *, wait_s: float | None = None, linger_s: float | None = 0.0) -> Answers:
        """Answers that are there; [] if nothing was asked.

        Waits until one is, or for `wait_s` seconds; then for more, until all are or nothing came
        for `linger_s` (None: until all are).
        """
        ...

    def drop_calls(self) -> None:
        """Forget every question."""
        ...

    def close(self) -> None:
        """Close environments and what they share."""
        ...


def answer(env: Environment, question: Question) -> list[Message] | StepResult:
    """Ask an environment here and now; an answer that is none raises an EnvError.

    Texts come back as a tokenizer can encode them.
    """
    return respond(env, question) if isinstance(question, str) else begin(env, *question)
