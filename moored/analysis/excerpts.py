"""Prompts shown from where they differ: tasks of one kind share long instructions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_CHARS = 600
"""Of a prompt."""
CONTEXT = 30
"""Characters before the first that differs, from the start of a line if one is near."""


def differing_parts(prompts: Sequence[str], most_chars: int = MOST_CHARS) -> list[str]:
    """Each prompt from a little before prompts begin to differ, cut to `most_chars`."""
    excerpts = Excerpts(most_chars)
    for prompt in prompts:
        excerpts.add(prompt)
    return excerpts.finish()


@dataclass(slots=True)
class Excerpts:
    """Collects prompts one after the other, and keeps of each only what will be shown.

    All prompts begin with the same `_num_shared` characters of the first one, so that these need
    not be kept with each.
    """

    most_chars: int = MOST_CHARS
    _first: str | None = None
    _num_shared: int = 0
    _kept: list[tuple[int, str, bool]] = field(default_factory=list)
    """Where a text starts in its prompt, the text, and whether the prompt goes on after it."""

    def add(self, prompt: str) -> int:
        """Take in a prompt; returns its number."""
        if self._first is None:
            self._first, self._num_shared = prompt, len(prompt)
        shared = os.path.commonprefix([self._first[: self._num_shared], prompt])  # noqa: RUF071
        self._num_shared = len(shared)
        stop = self._num_shared + self.most_chars
        self._kept.append((self._num_shared, prompt[self._num_shared : stop], stop < len(prompt)))
        return len(self._kept) - 1

    def finish(self) -> list[str]:
        """All prompts, in the order in which they came."""
        first, num = self._first or "", self._num_shared
        start = 0
        if any(text or place > num for place, text, _ in self._kept):
            line = first.rfind("\n", 0, max(num - CONTEXT, 0)) + 1
            start = max(line, num - 2 * CONTEXT)
        return [
            self._shown(first[start:place] + text, start > 0, goes_on)
            for place, text, goes_on in self._kept
        ]

    def _shown(self, text: str, is_cut: bool, goes_on: bool) -> str:
        text = text.strip("\n")
        if goes_on or len(text) > self.most_chars:
            text = f"{text[: self.most_chars]} …"
        return f"…\n{text}" if is_cut else text
