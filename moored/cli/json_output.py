"""`--json`: the record alone on standard output, so that a script can read it.

Environments and engines print what they like, also from processes of their own: with `--json` that
goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import wraps
from io import UnsupportedOperation
from typing import Any, TextIO

STDOUT, STDERR = 1, 2
_kept: ContextVar[TextIO | None] = ContextVar("_kept", default=None)


def print_json(record: object, default: Callable[[Any], object] | None = None) -> None:
    """Print what a command has found."""
    text = json.dumps(plain(record), indent=2, default=default)
    print(text, file=_kept.get() or sys.stdout, flush=True)


def plain(value: Any) -> Any:
    """NaN and infinities, which JSON has no numbers for, as null."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_json_alone(command: Callable[..., None]) -> Callable[..., None]:
    """The command; with `as_json` only `print_json` writes to standard output."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        if not options.get("as_json"):
            return command(*args, **options)
        with _kept_stdout() as stream:
            token = _kept.set(stream)
            try:
                command(*args, **options)
            finally:
                _kept.reset(token)

    return run


@contextmanager
def _kept_stdout() -> Iterator[TextIO]:
    """Standard output; while it lasts, all others that write to it write to stderr instead."""
    with ExitStack() as stack:
        stream = sys.stdout
        if _is_open(sys.stdout, STDOUT) and _is_open(sys.stderr, STDERR):
            # Processes inherit the descriptor, whatever stands in `sys.stdout`.
            sys.stdout.flush()
            copy = os.dup(STDOUT)
            stream = os.fdopen(copy, "w", encoding=sys.stdout.encoding, errors="replace")
            stack.callback(_give_back, stream)
            os.dup2(STDERR, STDOUT)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield stream


def _give_back(stream: TextIO) -> None:
    os.dup2(stream.fileno(), STDOUT)
    stream.close()


def _is_open(stream: TextIO | None, number: int) -> bool:
    """True where a stream writes to that descriptor, and not to what a caller put in its place."""
    try:
        return stream is not None and not stream.closed and stream.fileno() == number
    except (UnsupportedOperation, AttributeError):
        return False
