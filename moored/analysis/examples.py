"""Which texts of a closeup are worth a look: where prompts differ, who is tied to its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moored.analysis.diagnosis import Closeup

MOST_EXAMPLES = 3
"""Reasonings on either side."""
MOST_LETTERS = 600
"""Of a prompt."""
CONTEXT = 60
"""Letters before the first that differs, from the start of a line if one is near."""


@dataclass(frozen=True, slots=True)
class Example:
    """A reasoning, and how much likelier it is under its own prompt, in nats a token."""

    column: int
    prompt: str
    reasoning: str
    gain: float


def most_and_least_tied(closeup: Closeup) -> tuple[list[Example], list[Example]]:
    """The reasonings with the highest gains and those with the lowest, extremes first.

    One that was written twice for the same prompt is shown once.
    """
    gain_M, columns_M = closeup.token.gain_M, closeup.token.columns_M
    prompts = differing_parts(closeup.prompts)
    order = np.argsort(-gain_M, kind="stable").tolist()
    examples: dict[tuple[int, str], Example] = {}
    for m in order:
        column, reasoning = int(columns_M[m]), closeup.reasonings[m]
        example = Example(column, prompts[column], reasoning, float(gain_M[m]))
        examples.setdefault((column, reasoning), example)
    distinct = list(examples.values())
    num = min(MOST_EXAMPLES, len(distinct) // 2)
    return distinct[:num], distinct[::-1][:num]


def differing_parts(prompts: Sequence[str]) -> list[str]:
    """Each prompt from a little before prompts begin to differ, cut to `MOST_LETTERS`."""
    # Lowest and highest alone tell what all begin with.
    shared = os.path.commonprefix([min(prompts), max(prompts)])  # noqa: RUF071
    line = shared.rfind("\n", 0, max(len(shared) - CONTEXT, 0)) + 1
    start = max(line, len(shared) - 2 * CONTEXT)
    return [_shortened(prompt, start) for prompt in prompts]


def _shortened(prompt: str, start: int) -> str:
    text = prompt[start:].strip("\n")
    if len(text) > MOST_LETTERS:
        text = f"{text[:MOST_LETTERS]} …"
    return f"…\n{text}" if start else text
