"""What episodes need of environments, wherever those live.

`EnvCalls` has two implementations: `moored.rollout.pool.EnvPool`, threads of this process, and
`moored.engine.ray.env_pool.ActorPool`, processes of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from moored.envs.base import Environment, StepResult, encodable
from moored.errors import EnvError
from moored.types import Content, ImagePart, Message, TextPart

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
    if not isinstance(question, str):
        return _checked_messages(env.reset(*question))
    result = env.step(question)
    if not isinstance(result, StepResult):
        raise EnvError(f"step must return a StepResult, got {type(result).__name__}")
    for name, value in (("reward", result.reward), ("penalty", result.penalty)):
        if not math.isfinite(value):
            raise EnvError(f"a {name} must be a finite number, got {value}")
    for name, value in result.metrics.items():
        if not _is_number(value):
            raise EnvError(f"metric {name!r} must be a number, got {value!r:.80}")
    if result.is_over:
        return result
    seen = _checked_content(result.observation)
    return result if seen is result.observation else replace(result, observation=seen)


def _is_number(value: Any) -> bool:
    """False also for what only looks like one: an array of two numbers has a `__float__` too."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return hasattr(value, "__float__")


def _checked_messages(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise EnvError(f"reset must return a list of messages, got {messages!r:.80}")
    wrong = next((x for x in messages if not isinstance(x, Message)), None)
    if wrong is not None:
        raise EnvError(f"reset must return Message objects, got {wrong!r:.80}")
    return [_checked_message(x) for x in messages]


def _checked_message(message: Message) -> Message:
    content = _checked_content(message.content)
    return message if content is message.content else replace(message, content=content)


def _checked_content(content: object) -> Content:
    """The same object where there is nothing to replace."""
    if isinstance(content, str):
        text = content if content.isascii() else encodable(content)
        return content if text == content else text
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise EnvError(f"an observation must be text or a list of parts, got {content!r:.80}")
    return [_checked_part(part) for part in content]


def _checked_part(part: Mapping[str, Any]) -> TextPart | ImagePart:
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return TextPart(type="text", text=encodable(part["text"]))
    if kind == "image" and "image" in part:
        return ImagePart(type="image", image=part["image"])
    raise EnvError(f"a part of an observation must be a text or an image, got {part!r:.80}")
