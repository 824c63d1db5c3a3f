"""What every file becomes: one reply to one prompt, its rewards, and where its reasoning stands.

Also how the values of a row are read: numbers, texts, chat messages, token ids. `Unusable` says why
a row cannot be used; readers turn it into a `BadRow`, and callers decide what to do about those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moored.errors import ConfigError, MooredError, close_match_hint
from moored.reply import THINK_TAGS, Tags, find_think, format_think
from moored.types import Span

Row = Mapping[str, Any]
Chat = Sequence[Mapping[str, object]]
PromptLike = str | Chat | np.ndarray
"""Text, messages for a chat template, or token ids."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
ROLES = ("prompt", "response", "messages", "step", "group", "env", "success")
"""What `--columns` can name: `messages` is a whole dialogue, replies included."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exchange:
    """One turn: a prompt and the reply to it."""

    prompt: PromptLike
    response: str | np.ndarray
    think: Span | None = None
    """Characters of a text, tokens of ids; None: the reply holds no reasoning."""
    text: str | None = None
    """What `response` decodes to where it is ids: shows whether the tokenizer is another one."""
    observation_start: int | None = None
    """Where what the reply answers begins in the ids of `prompt`; None where it is not known."""

    @property
    def is_empty(self) -> bool:
        """True when there is a place for reasoning and nothing in it."""
        if self.think is None:
            return False
        inner = self.response[slice(*self.think)]
        return not (inner.strip() if isinstance(inner, str) else len(inner))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Record:
    """An episode: the reply of its first turn, and `later` turns where the file holds any."""

    step: int | None
    prompt: Any
    """`PromptLike`; with `only_rewards` whatever the file holds, None where it holds none."""
    response: Any
    """Text or token ids; with `only_rewards` as `prompt`, the whole episode."""
    think: Span | None = None
    """As `text` and `observation_start`: see `Exchange`."""
    text: str | None = None
    observation_start: int | None = None
    later: tuple[Exchange, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Column -> its value times its weight; NaN where it is not known."""
    group: str | None = None
    """Rewards of the same group are compared; None: those of equal prompts are."""
    env: str | None = None
    """Environments are measured apart; None where the file does not name any."""
    earned: float = math.nan
    """The reward with penalties, where `rewards` leave them out."""
    success: float = math.nan
    """1 or 0; NaN where it is not known."""
    is_valid: bool = True
    """False where the rewards leave out penalties, and a reply of the trajectory was malformed."""

    @property
    def reward(self) -> float:
        """Sum of the rewards that are known; NaN when none is."""
        known = [value for value in self.rewards.values() if math.isfinite(value)]
        return math.fsum(known) if known else math.nan

    @property
    def turns(self) -> tuple[Exchange, ...]:
        first = Exchange(
            prompt=self.prompt,
            response=self.response,
            think=self.think,
            text=self.text,
            observation_start=self.observation_start,
        )
        return first, *self.later


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How rows are read."""

    reader: str | None = None
    """Name of the format; None looks at the file."""
    tags: Tags = THINK_TAGS
    whole: bool = False
    """A reply without tags is reasoning from end to end, instead of being left out."""
    turn: int | None = None
    """One turn of each episode, where a file holds turns or dialogues; None: all of them."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward columns and their weights; none: what the format calls a reward."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """What a column holds (one of `ROLES`) -> its name; others have the format's names."""
    only_rewards: bool = False
    """Rewards of whole trajectories are compared and nothing is scored. A row then needs a reward,
    and a group or prompt; token ids are not read."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: where it stands and why."""

    where: str
    why: str
    is_torn: bool = False
    """The last line, cut short: its writer was stopped or is still writing."""


@dataclass(slots=True)
class Skipped:
    """What `usable` has left out."""

    num_bad: int = 0
    torn: list[str] = field(default_factory=list)
    """Places of the rows that are cut short."""


Convert = Callable[[Row], Record | None]
"""None: the row's episode ended before the turn that is asked for."""


class Unusable(Exception):
    """Why a row that could be read cannot be used."""


def usable(
    rows: Iterable[Record | BadRow], skipped: Skipped, *, skip_bad: bool = False
) -> Iterator[Record]:
    """The records; a torn row is skipped, another bad one raises unless `skip_bad`."""
    for row in rows:
        if isinstance(row, Record):
            yield row
        elif row.is_torn:
            skipped.torn.append(row.where)
        elif skip_bad:
            skipped.num_bad += 1
        else:
            raise MooredError(f"{row.where} {row.why}; correct it, or skip such rows: --skip-bad")


def parse_weights(texts: Iterable[str]) -> dict[str, float]:
    """`NAME` or `NAME=WEIGHT`, as `--reward` takes them."""
    weights = {}
    for text in texts:
        name, sign, weight = text.partition("=")
        try:
            weights[name] = float(weight) if sign else 1.0
        except ValueError:
            raise ConfigError(f"--reward takes COLUMN or COLUMN=WEIGHT, got {text!r}") from None
    return weights


def parse_columns(texts: Iterable[str], *, group: str | None = None) -> dict[str, str]:
    """`prompt=question,response=output`, as `--columns` takes it; `group` is that of `--group`."""
    columns = {} if group is None else {"group": group}
    for text in (part.strip() for given in texts for part in given.split(",")):
        role, sign, name = text.partition("=")
        if not sign or not name:
            raise ConfigError(
                f"--columns takes WHAT=COLUMN, such as prompt=question,response=output, got "
                f"{text!r}"
            )
        if role not in ROLES:
            hint = "rewards are named by --reward" if role == "reward" else ""
            raise ConfigError(
                f"--columns does not know {role!r}; {hint or close_match_hint(role, ROLES)}"
            )
        columns[role] = name
    return columns


def read_number(row: Row, name: str) -> float:
    """NaN where there is none. Text is parsed, since CSV holds nothing else."""
    value = row.get(name)
    if value is None or value == "":
        return math.nan
    try:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return float(value.lower() == "true")
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise Unusable(f"has {name!r} = {value!r:.80}, which is not a number") from None


def read_count(row: Row, name: str) -> int | None:
    """A whole number; None where there is none."""
    value = read_number(row, name)
    if math.isnan(value):
        return None
    if not value.is_integer():
        raise Unusable(f"has {name!r} = {row[name]!r:.80}, which is not a whole number")
    return int(value)


def weighted_rewards(row: Row, weights: Mapping[str, float]) -> dict[str, float]:
    """The columns named in `weights`, weighted."""
    return {name: weight * read_number(row, name) for name, weight in weights.items()}


def read_exchanges(
    row: Row, prompt: str | None, response: str, options: ReadOptions
) -> list[Exchange]:
    """The replies of an episode and what stood before each, or that of turn `options.turn` alone.

    Columns `prompt` and `response` hold texts, ids or messages; without a prompt column, the
    messages of `response` are the whole dialogue. Empty where the episode has no such turn.
    """
    before = [] if prompt is None else _read_prompt(row, prompt)
    value = _value(row, response)
    if not _is_chat(value):
        if prompt is None:
            raise Unusable(f"has a {response!r} that is not a list of messages: {value!r:.80}")
        if (options.turn or 1) > 1:
            raise Unusable(
                f"has one text as its reply, so there is no turn {options.turn}; only lists of "
                f"messages hold turns"
            )
        reply = _text_or_ids(response, value)
        return [Exchange(prompt=before, response=reply, think=_read_think(row, reply, options))]
    places = [place for place, m in enumerate(value) if m.get("role") == "assistant"]
    if not places:
        raise Unusable(f"has no assistant message in {response!r}")
    if options.turn is not None:
        places = places[options.turn - 1 : options.turn]
    if isinstance(before, str | np.ndarray):
        if (options.turn or 1) > 1:
            raise Unusable(
                f"has a {prompt!r} that is not a list of messages, so no turn can follow it; use "
                f"--turn 1"
            )
        places = places[:1]
    found = []
    messages = [_plain_message(response, m) for m in value[: max(places, default=0)]]
    for place in places:
        seen = before if isinstance(before, str | np.ndarray) else [*before, *messages[:place]]
        if len(seen) == 0:
            raise Unusable(f"has a dialogue in {response!r} that begins with the reply")
        reply = _reply_text(response, value[place], options.tags)
        think = find_reasoning(reply, options) if found else _read_think(row, reply, options)
        found.append(Exchange(prompt=seen, response=reply, think=think))
    return found


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) for x in value)


def _read_prompt(row: Row, name: str) -> PromptLike:
    value = _value(row, name)
    if _is_chat(value):
        return [_plain_message(name, message) for message in value]
    if value == "":
        raise Unusable(f"has an empty {name!r}: a reply needs a prompt to be scored under")
    return _text_or_ids(name, value)


def _reply_text(name: str, message: Row, tags: Tags) -> str:
    text = str(_plain_message(name, message)["content"])
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return text
    return _checked_text(name, format_think(str(reasoning), tags) + text)


def _read_think(row: Row, response: str | np.ndarray, options: ReadOptions) -> Span | None:
    """Where the reasoning stands: as the row says, else between tags."""
    start, end = read_count(row, "think_start"), read_count(row, "think_end")
    if start is None and end is None:
        return find_reasoning(response, options)
    if start is None or end is None or not 0 <= start <= end <= len(response):
        raise Unusable(
            f"has think_start={start!r}, think_end={end!r}: not a range inside the response "
            f"(0 to {len(response)})"
        )
    return start, end


def find_reasoning(response: str | np.ndarray, options: ReadOptions) -> Span | None:
    """Where the first reasoning stands, tags excluded.

    A closing tag alone counts from the start: the chat template wrote the opening one.
    """
    span = find_think(response, options.tags) if isinstance(response, str) else None
    return (0, len(response)) if span is None and options.whole else span


def _value(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise Unusable(f"has no {name!r}; it has {', '.join(row)[:200]}")
    return row[name]


def _plain_message(name: str, message: Row) -> dict[str, object]:
    """A message with its content as one string; what Parquet filled with null is left out."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise Unusable(f"holds images in {name!r}; only text can be scored")
        content = "".join(part["text"] for part in content)
    _checked_text(name, content)
    given = {key: value for key, value in message.items() if value is not None}
    return {**given, "content": content}


def _checked_text(name: str, text: str) -> str:
    if not text.isascii() and _HALF_CHARACTER.search(text):
        raise Unusable(
            f"has a {name!r} with half a character, which no tokenizer can encode (a lone "
            f"surrogate: the text was cut inside a character)"
        )
    return text


def _text_or_ids(name: str, value: object) -> str | np.ndarray:
    if isinstance(value, str):
        return _checked_text(name, value)
    if (
        isinstance(value, list)
        and value
        and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
    ):
        return np.array(value, dtype=np.int64)
    raise Unusable(f"has a {name!r} that is not text, messages or token ids: {value!r:.80}")
