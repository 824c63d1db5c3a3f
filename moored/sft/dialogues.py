"""Dialogues of a file: JSON lines with `messages`, or with `prompt` and `completion`.

The latter are two texts, or two lists of messages.

Each dialogue is an optional system message, then user and assistant in turns. What follows the last
reply is left out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ValidationError

from moored.errors import MooredError
from moored.types import Message, Role

Dialogue = tuple[Message, ...]
REMEDY = (
    'write one JSON object per line: {"messages": [{"role": "user", "content": "…"}, '
    '{"role": "assistant", "content": "…"}]}'
)


class _Message(BaseModel):
    role: Role
    content: str


class _Line(BaseModel):
    """A table with columns for both kinds of lines fills the other with null."""

    messages: list[_Message] | None = None
    prompt: str | list[_Message] | None = None
    completion: str | list[_Message] | None = None


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
        data = _Line.model_validate_json(line)
    except ValidationError as error:
        # Of a text or a list, the list's mistake is the more precise one.
        found = max(error.errors(), key=lambda item: len(item["loc"]))
        place = "".join(f"{part}: " for part in found["loc"])
        why = found["msg"].replace("at line 1 column", "at column")
        raise MooredError(f"{where}: {place}{why}; {REMEDY}") from error
    messages = [Message(each.role, each.content) for each in _messages(data, where)]
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        raise MooredError(f"{where} has no reply to learn: no message is of the role assistant")
    if any(message.role == "assistant" and not message.text.strip() for message in messages):
        raise MooredError(
            f"{where} has a reply without text, which would teach the model to end its turn at "
            f"once; write the reply, or leave the line out"
        )
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise MooredError(
            f"{where}: after an optional system message, user and assistant must alternate, got "
            f"{', '.join(roles)}"
        )
    return tuple(messages)


def _messages(line: _Line, where: str) -> list[_Message]:
    prompt, completion = line.prompt, line.completion
    if line.messages is not None:
        return line.messages
    if isinstance(prompt, str) and isinstance(completion, str):
        return [
            _Message(role="user", content=prompt),
            _Message(role="assistant", content=completion),
        ]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    raise MooredError(
        f"{where} has neither `messages` nor `prompt` and `completion` as two texts or two lists "
        f"of messages; {REMEDY}"
    )
