"""Type checks of `check_env`: everything an environment returns passes through here.

So a rule sees clean values only; what has the wrong type raises `Broken`.
"""

from __future__ import annotations

from collections.abc import Mapping

from moored.envs.base import StepResult
from moored.types import Message

_FIRST_ROLES = ["system", "user"]


class Broken(Exception):
    """The environment breaks a rule; the message says what was wrong, what came, what to do."""


def expect_attributes(env: object) -> None:
    """Raise unless `env` has the attributes and methods of the protocol."""
    kinds: tuple[tuple[str, type], ...] = (
        ("name", str),
        ("is_stochastic", bool),
        ("max_turns", int),
    )
    for name, kind in kinds:
        value = getattr(env, name, None)
        if type(value) is not kind:
            raise Broken(
                f"{type(env).__name__}.{name} must be a {kind.__name__}, got {value!r:.80}"
            )
    if not getattr(env, "name", ""):
        raise Broken(f"{type(env).__name__}.name is empty; name the environment")
    if getattr(env, "max_turns", 0) < 1:
        raise Broken(f"max_turns must be at least 1, got {getattr(env, 'max_turns', None)}")
    for name in ("reset", "step", "oracle", "close"):
        if not callable(getattr(env, name, None)):
            raise Broken(
                f"{type(env).__name__} has no method {name}(); see moored.envs.Environment"
            )


def expect_messages(messages: object) -> None:
    """Raise unless `messages` is what `reset` must return."""
    if not isinstance(messages, list) or not all(isinstance(item, Message) for item in messages):
        raise Broken(f"reset() must return a list of moored.types.Message, got {messages!r:.80}")
    roles = [message.role for message in messages]
    if roles != _FIRST_ROLES:
        raise Broken(f"reset() must return a system and a user message, got roles {roles}")
    for message in messages:
        _expect_content(message.content, f"the first {message.role} message")
        if not message.content:
            raise Broken(f"the first {message.role} message is empty; say what the task is")


def expect_result(result: object) -> StepResult:
    """Return `result` when its fields have the right types, else raise."""
    if not isinstance(result, StepResult):
        raise Broken(f"step() must return a moored.envs.StepResult, got {result!r:.80}")
    for name in ("reward", "penalty"):
        value = getattr(result, name)
        if isinstance(value, bool) or not isinstance(value, float | int):
            raise Broken(f"{name} must be a float, got {value!r:.80}; use float(...)")
    for name in ("terminated", "truncated", "is_valid", "success"):
        value = getattr(result, name)
        if type(value) is not bool:
            raise Broken(f"{name} must be a bool, got {value!r:.80}; use bool(...)")
    if result.terminated and result.truncated:
        raise Broken(
            "a result is terminated and truncated at once; report truncated only when a limit cut "
            "off what could have gone on"
        )
    if not isinstance(result.metrics, Mapping):
        raise Broken(f"metrics must map names to numbers, got {result.metrics!r:.80}")
    for name, value in result.metrics.items():
        if not isinstance(name, str) or not isinstance(value, float | int):
            raise Broken(f"metrics must map names to numbers, got {name!r}: {value!r:.80}")
    _expect_content(result.observation, "an observation")
    return result


def _expect_content(content: object, what: str) -> None:
    if not isinstance(content, str | list):
        raise Broken(f"{what} must be text or a list of parts, got {content!r:.80}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                _expect_utf8(text, what)
            case {"type": "image", "image": image} if hasattr(image, "tobytes"):
                pass
            case _:
                raise Broken(
                    f"a part of {what} must be {{'type': 'text', 'text': …}} or {{'type': "
                    f"'image', 'image': a PIL image}}, got {part!r:.80}"
                )


def _expect_utf8(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Broken(
            f"{what} cannot be encoded: {error.reason} at character {error.start}; do not echo "
            f"what a reply holds"
        ) from error
