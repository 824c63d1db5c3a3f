"""Does an option's value have the kind its annotation asks for?

pydantic judges, strictly: values come from a command line or YAML, where a slip would otherwise
pass silently. A bool is not a number; 2.5 is not a count; text is not a number. A whole float is a
count (8.0), an int is a number, and text is a path. An annotation that pydantic does not know takes
every value.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

KINDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
PLURALS: dict[object, str] = {int: "whole numbers", float: "numbers", str: "texts"}
CONTAINERS = {Sequence: "a list", Mapping: "a mapping", Callable: "a function"}
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
    """The value as its kind wants it (8.0 becomes 8 for int), or MISFIT."""
    adapter = _adapter(kind)
    if adapter is None:
        return value
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError:
        pass
    try:
        # As a file would say it: there, text stands for a path and 8.0 for 8.
        return adapter.validate_json(json.dumps(_with_whole_numbers(value)), strict=True)
    except (ValidationError, TypeError, ValueError):
        return MISFIT


def describe_kind(kind: object) -> str:
    """The kind in words: `a whole number or a list of whole numbers`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_kind(part) for part in parts))
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is None or not isinstance(origin, type):
        return KINDS.get(kind, str(kind))
    words = next((words for base, words in CONTAINERS.items() if issubclass(origin, base)), "")
    is_list = words == CONTAINERS[Sequence] and parts
    return f"{words} of {PLURALS.get(parts[0], 'values')}" if is_list else words or str(kind)


@functools.lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(kind)
    except PydanticUserError:
        return None


def _with_whole_numbers(value: object) -> object:
    """Floats without a fraction as ints, also in lists."""
    if isinstance(value, list | tuple):
        return [_with_whole_numbers(member) for member in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    number = float(value)
    return int(number) if number.is_integer() else number
