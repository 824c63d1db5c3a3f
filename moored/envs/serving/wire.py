"""Messages and results as JSON, for a server of environments and its clients.

Content is text, or a list of text parts and of PNG images in base64. What comes from the other side
is checked: a result that is not one raises `WireError`.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping
from typing import Any, cast, get_args

from moored.envs.base import StepResult
from moored.errors import EnvError, require_packages
from moored.types import Content, ImagePart, Message, Role, TextPart

PROTOCOL = 1
"""Number of the protocol; a client refuses a server that speaks another one."""
FLAGS = ("terminated", "truncated", "is_valid", "success")


class NoRoomError(EnvError):
    """All sessions of the server are in use."""


class WireError(EnvError):
    """JSON from the other side that is not what the protocol says."""


def content_to_json(content: Content) -> object:
    """Text as it is; parts as `{"type": "text", …}` and `{"type": "image", "png": base64}`."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "image", "png": _png(part["image"])}
        for part in content
    ]


def content_from_json(data: object) -> Content:
    """The inverse of `content_to_json`."""
    if isinstance(data, str):
        return data
    if not isinstance(data, list) or not data:
        raise WireError(f"content must be text or a list of parts, got {data!r:.80}")
    return [_part(part) for part in data]


def messages_to_json(messages: list[Message]) -> list[dict[str, object]]:
    """Role and content of each message."""
    return [{"role": x.role, "content": content_to_json(x.content)} for x in messages]


def messages_from_json(data: object) -> list[Message]:
    """The inverse of `messages_to_json`."""
    if not isinstance(data, list) or not data:
        raise WireError(f"messages must be a list that is not empty, got {data!r:.80}")
    return [_message(item) for item in data]


def result_to_json(result: StepResult) -> dict[str, object]:
    """Every field of a result; numbers and flags of numpy as plain ones."""
    return {
        "observation": content_to_json(result.observation),
        "reward": float(result.reward),
        "penalty": float(result.penalty),
        **{flag: bool(getattr(result, flag)) for flag in FLAGS},
        "metrics": {str(name): float(value) for name, value in result.metrics.items()},
    }


def result_from_json(data: object) -> StepResult:
    """The inverse of `result_to_json`."""
    fields = expect_mapping(data)
    flags = {flag: fields.get(flag) for flag in FLAGS}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise WireError(f"a result needs {', '.join(FLAGS)} as true or false, got {flags}")
    if flags["terminated"] and flags["truncated"]:
        raise WireError("a result cannot be both terminated and truncated")
    metrics = expect_mapping(fields.get("metrics", {}))
    return StepResult(
        observation=content_from_json(fields.get("observation")),
        reward=expect_number("reward", fields.get("reward")),
        penalty=expect_number("penalty", fields.get("penalty", 0.0)),
        metrics={str(name): expect_number(str(name), value) for name, value in metrics.items()},
        **cast(dict[str, bool], flags),
    )


def expect_mapping(data: object) -> Mapping[str, Any]:
    """The data, if it is a JSON object."""
    if not isinstance(data, Mapping):
        raise WireError(f"a JSON object was expected, got {data!r:.80}")
    return data


def expect_number(name: str, value: object) -> float:
    """The value, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WireError(f"{name} must be a number, got {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WireError(f"{name} must be a finite number, got {value!r:.80}")
    return number


def _message(data: object) -> Message:
    fields = expect_mapping(data)
    role: Any = fields.get("role")
    if role not in get_args(Role):
        raise WireError(f"a message needs one of the roles {get_args(Role)}, got {role!r:.80}")
    return Message(role, content_from_json(fields.get("content")))


def _part(data: object) -> TextPart | ImagePart:
    fields = expect_mapping(data)
    if fields.get("type") == "text" and isinstance(fields.get("text"), str):
        return TextPart(type="text", text=fields["text"])
    if fields.get("type") == "image" and isinstance(fields.get("png"), str):
        return ImagePart(type="image", image=_image(fields["png"]))
    raise WireError(f"a part of a message must be text or a PNG image, got {data!r:.80}")


def _png(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _image(text: str) -> object:
    require_packages("an environment that shows pictures", ("PIL",))
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as file:
            return file.copy()
    except (binascii.Error, OSError, SyntaxError, ValueError) as error:
        raise WireError(f"a picture cannot be read: {error}") from error
