"""OpenAI's chat format: messages to JSON, and JSON back to a reply."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

from moored.errors import MooredError
from moored.reply import join_reasoning
from moored.types import Message


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The first choice of a chat completion."""

    text: str
    is_cut: bool
    """True when the reply reached its longest length."""
    num_tokens: int | None
    """What the server counted; None when it does not say."""


def message_to_json(message: Message) -> dict[str, object]:
    """A message as the API takes it; images become data URIs."""
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts: list[dict[str, object]] = []
    for part in message.content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": part["text"]})
        else:
            parts.append({"type": "image_url", "image_url": {"url": _data_uri(part["image"])}})
    return {"role": message.role, "content": parts}


def parse_chat_reply(answer: Any) -> ChatReply:
    """Read a chat completion; a `MooredError` when it holds no reply."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        # vLLM renamed the first to the second; other servers kept it.
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not (isinstance(content, str) and isinstance(reasoning, str)):
            raise TypeError
        is_cut = choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError):
        raise MooredError(f"the answer holds no reply: {answer}") from None
    text = join_reasoning(reasoning, content)
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return ChatReply(text, is_cut, count if isinstance(count, int) else None)


def parse_model_names(answer: Any) -> list[str]:
    """Names in the answer to `/models`; none when it is something else."""
    try:
        return [str(model["id"]) for model in answer["data"]]
    except (KeyError, TypeError):
        return []


def _data_uri(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
