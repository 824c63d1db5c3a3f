"""Where commands print: wrapped to the width of a terminal, never in a pipe or a file.

Text is printed as it is: square brackets are not markup and `:name:` is not a picture, since both
occur in paths. For styles, commands pass `style=` or a `rich.text.Text`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import StyleType
    from rich.text import Text

PIPE_WIDTH = 160
"""Widest table where there is no terminal; lines of text are not broken at all."""


def make_console(*, stderr: bool = False) -> Console:
    """A console whose output in a pipe does not depend on terminal or environment variables."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=PIPE_WIDTH,
        soft_wrap=True,
    )


def counted(count: int, what: str) -> str:
    """1 episode, 2 episodes."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def print_line(console: Console, text: str | Text, *, style: StyleType | None = None) -> None:
    """Print a line that may hold a path or a command: never broken, so that it can be copied."""
    console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)
