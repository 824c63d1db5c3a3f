"""Where commands print: wrapped to the width of a terminal, never in a pipe or a file.

Text is printed as it is: square brackets are not markup and `:name:` is not a picture, since both
occur in paths. For styles, commands pass `style=` or a `rich.text.Text`. What would command the
terminal is shown as an escape; a `Text` of model or environment goes through `printable` first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import StyleType
    from rich.text import Text

PIPE_WIDTH = 160
"""Widest table where there is no terminal; lines of text are not broken at all."""
CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
"""C0 and C1: with these a reply could clear the screen, retitle the window or forge lines."""


def printable(text: str) -> str:
    """The text with control characters as `\\x1b`; line breaks and tabs stay."""
    return text.replace("\r\n", "\n").translate(CONTROLS)


def make_console(*, stderr: bool = False) -> Console:
    """A console whose output in a pipe does not depend on terminal or environment variables."""
    make = _console_class()
    console = make(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return make(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=PIPE_WIDTH,
        soft_wrap=True,
    )


@functools.cache
def _console_class() -> type[Console]:
    from rich.console import Console

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return PrintableConsole


def counted(count: int, what: str) -> str:
    """1 episode, 2 episodes."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def print_line(console: Console, text: str | Text, *, style: StyleType | None = None) -> None:
    """Print a line that may hold a path or a command: never broken, so that it can be copied."""
    console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)
