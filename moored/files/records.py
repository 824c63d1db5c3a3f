"""What every reader yields: one reply to one prompt, and where in it the reasoning stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moored.files.tables import BadRow as BadRow
from moored.reply import THINK_TAGS, find_think
from moored.types import Span

Chat = Sequence[Mapping[str, object]]
PromptLike = str | Chat | np.ndarray
"""Text, messages for a chat template, or token ids."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Record:
    """A reply. `think` counts characters of a text, tokens of ids; None: it holds no reasoning."""

    step: int | None
    prompt: PromptLike
    response: str | np.ndarray
    think: Span | None
    reward: float | None = None
    group: str | None = None
    """Whose rewards belong together; None: those of equal prompts do."""
    text: str | None = None
    """What `response` decodes to where it is ids: betrays another tokenizer."""

    @property
    def is_empty(self) -> bool:
        """True when there is a place for reasoning and nothing in it."""
        if self.think is None:
            return False
        inner = self.response[slice(*self.think)]
        return not (inner.strip() if isinstance(inner, str) else len(inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How replies are read."""

    tags: tuple[str, str] = THINK_TAGS
    whole: bool = False
    """A reply without tags is reasoning from end to end, instead of being left out."""
    turn: int = 1
    """Which turn of an episode, where the file tells turns apart."""
    rewards: tuple[str, ...] = ()
    """Columns to sum to a reward; none: what the format calls a reward."""


def find_reasoning(response: str | np.ndarray, options: ReadOptions) -> Span | None:
    """Where the first reasoning stands, tags excluded.

    A closing tag alone counts from the start: the chat template wrote the opening one.
    """
    if isinstance(response, str):
        span = find_think(response, options.tags)
        if span is not None:
            return span
    return (0, len(response)) if options.whole else None
