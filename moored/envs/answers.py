"""What an environment answers, looked at before it is used.

Environments are code of others: an answer of a wrong kind raises an EnvError that says so, and
texts come back as a tokenizer can encode them.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from moored.envs.base import Environment, StepResult, encodable
from moored.errors import EnvError
from moored.types import Content, ImagePart, Message, TextPart


def begin(env: Environment, task_seed: int, episode_seed: int = 0) -> list[Message]:
    """The first messages of an episode."""
    return [_checked_message(x) for x in require_messages(env.reset(task_seed, episode_seed))]


def respond(env: Environment, reply: str) -> StepResult:
    """What comes of a reply."""
    result = require_result(env.step(reply))
    for name, value in (("reward", result.reward), ("penalty", result.penalty)):
        if not _is_number(value) or not math.isfinite(value):
            raise EnvError(f"a {name} must be a finite number, got {value!r:.80}")
    for name, value in result.metrics.items():
        if not _is_number(value):
            raise EnvError(f"metric {name!r} must be a number, got {value!r:.80}")
    if result.is_over:
        return result
    seen = _checked_content(result.observation)
    return result if seen is result.observation else replace(result, observation=seen)


def require_messages(messages: object) -> list[Message]:
    """What `reset` returned, if it is what it must be."""
    if not isinstance(messages, list) or not messages:
        raise EnvError(f"reset must return a list of messages, got {messages!r:.80}")
    wrong = next((x for x in messages if not isinstance(x, Message)), None)
    if wrong is not None:
        raise EnvError(f"reset must return Message objects, got {wrong!r:.80}")
    return messages


def require_result(result: object) -> StepResult:
    """What `step` returned, if it is what it must be."""
    if not isinstance(result, StepResult):
        hint = "; write def step, not async def" if isinstance(result, Coroutine) else ""
        raise EnvError(f"step must return a StepResult, got {type(result).__name__}{hint}")
    return result


def _is_number(value: Any) -> bool:
    """False also for what only looks like one: an array of two numbers has a `__float__` too."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return hasattr(value, "__float__")


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
