"""Python source as a syntax tree; nothing is run."""

from __future__ import annotations

import ast
import threading
import warnings

_lock = threading.Lock()


def parse_source(source: str) -> ast.Module:
    r"""Like `ast.parse`, silent about what it only warns of, such as `"\w"`.

    Raises SyntaxError, ValueError, MemoryError or RecursionError.
    """
    # Filters of warnings belong to the process: two threads must not change them at once.
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
