"""A row of each format to a `Record`; `Unusable` says why one cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moored.files.records import PromptLike, ReadOptions, Record, find_reasoning
from moored.files.tables import Row, Unusable, number, whole_number
from moored.reply import format_think
from moored.types import Span


def from_moored(row: Row, options: ReadOptions) -> Record:
    if row["images"]:
        raise Unusable("holds images; only text can be scored")
    start, end = row["think_start"], row["think_end"]
    return Record(
        step=row["step"],
        prompt=np.array(row["prompt_ids"], dtype=np.int64),
        response=np.array(row["completion_ids"], dtype=np.int64),
        think=None if start is None else (start, end),
        reward=_sum_of(row, ("trajectory_reward",)),
        group=str(row["group_id"]),
        text=row["reply"],
    )


def from_trl(row: Row, options: ReadOptions, *, rewards: Sequence[str]) -> Record:
    response = _reply(row, "completion", options)
    return Record(
        step=whole_number(row, "step"),
        prompt=_prompt(row, "prompt"),
        response=response,
        think=find_reasoning(response, options),
        reward=_sum_of(row, rewards),
    )


def from_verl(row: Row, options: ReadOptions) -> Record:
    response = _reply(row, "output", options)
    return Record(
        step=whole_number(row, "step"),
        prompt=_prompt(row, "input"),
        response=response,
        think=find_reasoning(response, options),
        reward=_sum_of(row, options.rewards or ("score",)),
        group=None if row.get("uid") is None else str(row["uid"]),
    )


def from_plain(row: Row, options: ReadOptions) -> Record:
    response = _reply(row, "response", options)
    return Record(
        step=whole_number(row, "step"),
        prompt=_prompt(row, "prompt"),
        response=response,
        think=_given_span(row, response) or find_reasoning(response, options),
        reward=_sum_of(row, options.rewards or ("reward",)),
        group=None if row.get("group") is None else str(row["group"]),
    )


def _value(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise Unusable(f"has no {name!r}; it has {', '.join(row)[:200]}")
    return row[name]


def _prompt(row: Row, name: str) -> PromptLike:
    value = _value(row, name)
    if isinstance(value, list) and value and all(isinstance(x, Mapping) for x in value):
        return [_plain_message(name, message) for message in value]
    return _text_or_ids(name, value)


def _reply(row: Row, name: str, options: ReadOptions) -> str | np.ndarray:
    """The reply; of a dialogue its first message of the model."""
    value = _value(row, name)
    if not (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return _text_or_ids(name, value)
    written = next((m for m in value if m.get("role") == "assistant"), None)
    if written is None:
        raise Unusable(f"has no assistant message in {name!r}")
    text = str(_plain_message(name, written)["content"])
    reasoning = written.get("reasoning_content")
    return text if not reasoning else format_think(str(reasoning), options.tags) + text


def _plain_message(name: str, message: Row) -> dict[str, object]:
    """A message with its content as one string; what Parquet filled with null is left out."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise Unusable(f"holds images in {name!r}; only text can be scored")
        content = "".join(part["text"] for part in content)
    given = {key: value for key, value in message.items() if value is not None}
    return {**given, "content": content}


def _text_or_ids(name: str, value: object) -> str | np.ndarray:
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
    ):
        return np.array(value, dtype=np.int64)
    raise Unusable(f"has a {name!r} that is no text, no messages and no token ids: {value!r:.80}")


def _given_span(row: Row, response: str | np.ndarray) -> Span | None:
    start, end = row.get("think_start"), row.get("think_end")
    if start is None and end is None:
        return None
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(response):
        raise Unusable(
            f"has think_start={start!r}, think_end={end!r}: not a range inside the response "
            f"(0 to {len(response)})"
        )
    return start, end


def _sum_of(row: Row, names: Sequence[str]) -> float | None:
    """Of the rewards that are there; None when none is."""
    found = [x for x in (number(row, name) for name in names) if math.isfinite(x)]
    return sum(found) if found else None
