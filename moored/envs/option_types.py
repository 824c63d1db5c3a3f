"""Does an option's value have the kind its annotation asks for?

`fit_value` reads the annotations environments use (int, float, bool, str, Path, Literal, sequences,
mappings, unions of these). Values come from a command line or YAML, so it is strict where a slip of
the pen would pass silently: True is no number, and 2.5 is no count. What it does not know it lets
through.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

KINDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
PLURALS: dict[object, str] = {int: "whole numbers", float: "numbers", str: "texts"}
MISFIT = object()
"""What `fit_value` returns for a value of another kind."""


def annotations_of(function: Callable[..., object]) -> dict[str, object]:
    """Name -> annotation of the parameters; where there is none, the type of a plain default."""
    found: dict[str, object] = {
        name: type(parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if type(parameter.default) in (int, float, bool, str)
    }
    try:
        return found | get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return found  # names that are imported for type checkers only


def fit_value(value: object, kind: object) -> object:
    """The value as its kind wants it (3.0 becomes 3 for int), or MISFIT."""
    if kind in (int, float):
        return _fit_number(value, is_whole=kind is int)
    if kind is Path:
        return value if isinstance(value, str | Path) else MISFIT
    if kind in KINDS:
        return value if isinstance(value, kind) else MISFIT  # pyright: ignore[reportArgumentType]
    return _fit_generic(value, get_origin(kind), get_args(kind))


def describe_kind(kind: object) -> str:
    """The kind in words: `a whole number or a list of whole numbers`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_kind(part) for part in parts))
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is not None and issubclass(origin, Sequence):
        return f"a list of {PLURALS.get(parts[0], 'values')}" if parts else "a list"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    return KINDS.get(kind, str(kind))


def _fit_number(value: object, *, is_whole: bool) -> object:
    if not isinstance(value, Real) or isinstance(value, bool):
        return MISFIT
    if not is_whole:
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() else MISFIT


def _fit_generic(value: object, origin: object, parts: tuple[object, ...]) -> object:
    if origin in (Union, types.UnionType):
        fits = (fit_value(value, part) for part in parts)
        return next((fit for fit in fits if fit is not MISFIT), MISFIT)
    if origin is Literal:
        return value if value in parts else MISFIT
    if origin is Sequence:
        return _fit_sequence(value, parts[0])
    if origin is Mapping:
        return value if isinstance(value, Mapping) else MISFIT
    return value


def _fit_sequence(value: object, kind: object) -> object:
    """Member by member; a text is a sequence of texts, as where rows are given in one string."""
    if isinstance(value, str):
        return value if kind is str else MISFIT
    if not isinstance(value, Sequence):
        return MISFIT
    members = [fit_value(member, kind) for member in value]
    return MISFIT if MISFIT in members else members
