"""What a problem is: a statement, hidden tests, and a program that passes them."""

from __future__ import annotations

import ast
import threading
import warnings
from dataclasses import dataclass
from typing import Literal

from moored.envs.base import Split

Kind = Literal["stdin", "call", "assert", "beside"]
"""Tests that assert run in a process without the program, or beside it, which it can deceive."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test."""

    given: object
    """Text for standard input; a list of arguments; or code that asserts."""
    expected: object = None
    """Text on standard output; or the value to return. None for asserts."""
    or_list: bool = False
    """A list with the expected value alone is right too: the data set does not say which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A task of the environment `code`."""

    statement: str
    kind: Kind
    cases: tuple[Case, ...]
    key: str
    """What the problem is, however it is worded: it decides the split."""
    solution: str
    """A program that passes; empty where the data set gives none."""
    asks: str = ""
    """What is to be computed from what, in a few words; empty where only the statement says so."""
    plan: str = ""
    """How the solution computes it; empty where only the statement says so."""
    entry: str = ""
    """The function to write; empty for a program that reads standard input."""
    preamble: str = ""
    """Imports that the data set takes for granted."""
    tolerance: float = 0.0
    """Relative difference at which numbers with a decimal point still count as equal."""
    keeps_types: bool = False
    """A tuple is not a list, as in Python; data sets in JSON know lists only."""
    split: Split | None = None
    """The split that the data set puts it into; None: by its key."""


_filters_lock = threading.Lock()


def parse_source(source: str) -> ast.Module:
    r"""Like `ast.parse`, silent about what it only warns of, such as `"\w"`.

    Raises SyntaxError, ValueError, MemoryError or RecursionError.
    """
    # Filters of warnings belong to the process: two threads must not change them at once.
    with _filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
