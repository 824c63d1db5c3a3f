"""Answers of the form `verb[text]`: one action each."""

from __future__ import annotations

import re
from collections.abc import Iterable

BRACKETED = re.compile(r"\[[^][]*\]")


def holds_two(text: str, verbs: Iterable[str]) -> bool:
    """Whether the outer brackets hold the end of an action and another one: `a] || search[b`.

    The other one begins with `||`, with any word right before its bracket, or with one of `verbs`.
    Pairs of brackets inside are part of the text.
    """
    _, end, rest = BRACKETED.sub("]", text).partition("]")
    known = "|".join(verbs)
    another = rf"\]\s*\|\||[a-z]{{2}}\[|(?<![a-z])(?:{known})\s*\["
    return re.search(another, end + rest, re.IGNORECASE) is not None
