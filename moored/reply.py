"""What a model's reply consists of: the only place that finds reasoning and answer tags in text.

Nothing here raises on model text; everything runs in linear time and executes nothing. Imports
only the standard library, so that every layer can use it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moored.types import Span

Tags = tuple[str, str]
THINK_TAGS: Tags = ("<think>", "</think>")
ANSWER_TAGS: Tags = ("<answer>", "</answer>")
TAGS = (*THINK_TAGS, *ANSWER_TAGS)
_ANY_TAG = re.compile("|".join(TAGS))
MAX_ACTIONS_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of a model's reply; both are None when the tags are malformed."""

    think: str | None
    answer: str | None

    @property
    def is_valid(self) -> bool:
        return self.answer is not None


def parse_reply(text: str) -> Reply:
    """Read `<think>…</think><answer>…</answer>`: each tag once, in this order, else invalid.

    Text before the first and after the last tag is ignored; only white space may stand between the
    two blocks.
    """
    parts = find_parts(text)
    if parts is None:
        return Reply(None, None)
    think, answer = (text[start:stop].strip() for start, stop in parts)
    return Reply(think, answer)


def find_parts(text: str) -> tuple[Span, Span] | None:
    """Characters of reasoning and answer, tags excluded; None when `parse_reply` finds none."""
    tags = list(islice(_ANY_TAG.finditer(text), len(TAGS) + 1))
    if tuple(tag.group() for tag in tags) != TAGS:
        return None
    think_open, think_close, answer_open, answer_close = tags
    if text[think_close.end() : answer_open.start()].strip():
        return None
    return (think_open.end(), think_close.start()), (answer_open.end(), answer_close.start())


def format_reply(think: str, answer: str) -> str:
    """The inverse of `parse_reply`."""
    return format_think(think) + answer.join(ANSWER_TAGS)


def format_think(think: str, tags: Tags = THINK_TAGS) -> str:
    """Reasoning between its tags."""
    return think.join(tags)


def find_think(text: str, tags: Tags = THINK_TAGS, *, is_open: bool | None = None) -> Span | None:
    """Characters of the first reasoning, tags excluded; None where there is none.

    `is_open` says whether the prompt ends with the opening tag. With None that is not known, and a
    closing tag without an opening one before it counts from the start of the text.
    """
    opening, closing = tags
    if is_open is None:
        stop = text.find(closing)
        is_open = stop >= 0 and text.find(opening, 0, stop) < 0
    start = 0
    if not is_open:
        at = text.find(opening)
        if at < 0:
            return None
        start = at + len(opening)
    stop = text.find(closing, start)
    return None if stop < 0 else (start, stop)


def ends_open(prompt: str, tags: Tags = THINK_TAGS) -> bool:
    """True when a prompt ends with the opening tag, so that the reply starts inside it."""
    return prompt.rstrip().endswith(tags[0])


def open_think(prompt: str) -> str:
    """The end of a prompt from an opening tag that it does not close; mostly nothing."""
    opening, closing = THINK_TAGS
    at = prompt.rfind(opening)
    return "" if at < 0 or closing in prompt[at:] else prompt[at:]


def find_answer(text: str) -> str:
    """The text between the last answer tags, or the whole text."""
    opening, closing = ANSWER_TAGS
    _, tag, after = text.rpartition(opening)
    return after.partition(closing)[0].strip() if tag else text.strip()


def join_reasoning(reasoning: str, content: str) -> str:
    """The reply as the model wrote it, before a server took its reasoning out.

    Content that is a well-formed reply by itself stays as it is: the model then reasoned twice.
    Where the chat template writes `<think>` in the model's name, the tag is put back.
    """
    opening, closing = THINK_TAGS
    if reasoning and not parse_reply(content).is_valid:
        return format_think(reasoning) + content
    return opening + content if closing in content and opening not in content else content


def parse_actions(answer: str, actions: Sequence[str]) -> list[str] | None:
    """Split `A || B` into known action names (any case); None when a part is unknown or empty."""
    if len(answer) > MAX_ACTIONS_CHARS:
        return None
    known = _by_folded_name(tuple(actions))
    parts = [known.get(part.strip().casefold()) for part in answer.split("||")]
    return None if None in parts else [part for part in parts if part is not None]


@lru_cache(maxsize=64)
def _by_folded_name(actions: tuple[str, ...]) -> dict[str, str]:
    return {action.casefold(): action for action in actions}
