"""Dialogues of a file: JSON lines with `messages`, or with `prompt` and `completion`.

The latter are two texts, or two lists of messages.

Each dialogue is an optional system message, then user and assistant in turns. What follows the last
reply is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

from moored.envs.base import encodable
from moored.errors import MooredError
from moored.types import Message, Role

Dialogue = tuple[Message, ...]
REMEDY = (
    'write one JSON object per line: {"messages": [{"role": "user", "content": "…"}, '
    '{"role": "assistant", "content": "…"}]}'
)

KINDS = {
    type(None): "null",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}
"""What a value of JSON is called; the others are numbers."""


def read_dialogues(file: str | Path) -> list[Dialogue]:
    """All dialogues of a file; the first line that is not one is named in the error."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise MooredError(f"dialogues {str(file)!r} are not text in UTF-8") from error
    lines = [
        (number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    if not lines:
        raise MooredError(f"dialogues {str(file)!r}: the file is empty; {REMEDY}")
    return [_read_line(line, f"{str(file)!r}, line {number}") for number, line in lines]


def file_digest(file: str | Path) -> str:
    """SHA-256 of a file of dialogues, which tells whether it was edited."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: str | Path, error: OSError) -> MooredError:
    return MooredError(f"cannot read dialogues {str(file)!r}: {error.strerror}")


def hold_out(dialogues: list[Dialogue], most: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """Those to learn from, and at most `most` and a tenth to test on, chosen by content.

    Two equal dialogues stay together, so what is tested was never learnt.
    """
    digests = [_digest(dialogue) for dialogue in dialogues]
    distinct = dict(zip(digests, dialogues, strict=True))
    count = min(most, max(1, len(distinct) // 10)) if len(distinct) > 1 else 0
    tested = {digest: distinct[digest] for digest in sorted(distinct)[:count]}
    pairs = zip(digests, dialogues, strict=True)
    return [d for digest, d in pairs if digest not in tested], list(tested.values())


def _digest(dialogue: Dialogue) -> str:
    text = json.dumps([message.to_dict() for message in dialogue])
    return hashlib.sha256(text.encode()).hexdigest()


def _read_line(line: str, where: str) -> Dialogue:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MooredError(f"{where} is not JSON ({_reason(error)}); {REMEDY}") from error
    messages = [_message(item, where) for item in _items(data, where)]
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        raise MooredError(f"{where} has no reply to learn: no message is of the role assistant")
    if any(message.role == "assistant" and not message.text.strip() for message in messages):
        raise MooredError(
            f"{where} has a reply without text, which would teach the model to end its turn at "
            f"once; write the reply, or leave the line out"
        )
    turns = messages[1:] if messages[0].role == "system" else messages
    expected = ["user", "assistant"] * (len(turns) // 2)
    if [message.role for message in turns] != expected:
        raise MooredError(
            f"{where}: after an optional system message, user and assistant must alternate, got "
            f"{', '.join(message.role for message in messages)}"
        )
    return tuple(messages)


def _reason(error: Exception) -> str:
    """What is wrong, with the column; the line in this text is always the first."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return str(error)


def _items(data: object, where: str) -> list[object]:
    if not isinstance(data, Mapping):
        raise MooredError(f"{where} holds {_kind(data)}, not an object; {REMEDY}")
    messages = data.get("messages")
    if isinstance(messages, list):
        return messages
    # A table that has columns for both kinds of lines fills the other with null.
    if "prompt" in data and "completion" in data:
        return _pair(data["prompt"], data["completion"], where)
    if "messages" in data:
        raise MooredError(f"{where}: `messages` must be a list, got {_kind(messages)}; {REMEDY}")
    known = ", ".join(map(str, data)) or "no keys"
    raise MooredError(
        f"{where} has neither `messages` nor `prompt` and `completion` (it has {known}); {REMEDY}"
    )


def _pair(prompt: object, completion: object, where: str) -> list[object]:
    """A question and its reply: two texts, or two lists of messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        texts = (("user", prompt), ("assistant", completion))
        return [{"role": role, "content": text} for role, text in texts]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    raise MooredError(
        f"{where}: `prompt` and `completion` must be two texts or two lists of messages, got "
        f"{_kind(prompt)} and {_kind(completion)}; {REMEDY}"
    )


def _kind(value: object) -> str:
    """What JSON calls it."""
    return KINDS.get(type(value), "a number")


def _message(item: object, where: str) -> Message:
    role, content = (
        (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
    )
    if role not in get_args(Role) or not isinstance(content, str):
        raise MooredError(
            f"{where}: a message needs a role ({', '.join(get_args(Role))}) and a text as content, "
            f"got {json.dumps(item)[:80]}"
        )
    if encodable(content) != content:
        raise MooredError(
            f"{where}: a message holds half a character, which no tokenizer can encode (a lone "
            f"surrogate: the text was cut inside a character), got {json.dumps(item)[:80]}"
        )
    return Message(cast(Role, role), content)
