"""Where commands print: wrapped to the width of a terminal, never in a pipe or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160
"""Widest table where there is no terminal; lines of text are not broken at all."""


def make_console(*, stderr: bool = False) -> Console:
    """A console whose output in a pipe does not depend on terminal or environment variables."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=PIPE_WIDTH, soft_wrap=True)
