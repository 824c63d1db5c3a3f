"""What is wrong with the data of a configuration, in one sentence for each mistake."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from moored.errors import MooredError, close_match_hint


def unknown_keys(root: type[BaseModel], data: object) -> Iterator[str]:
    """One sentence for every key that no section has; `root` is the whole configuration."""
    yield from _unknown(root, root, data, "")


def _unknown(
    root: type[BaseModel], model: type[BaseModel], data: object, path: str
) -> Iterator[str]:
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        here = f"{path}{key}"
        if key not in model.model_fields:
            yield f"unknown option {here!r}; {_hint(root, str(key), model)}"
            continue
        section = _section_of(model.model_fields[str(key)].annotation)
        items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for position, item in items if section else []:
            inner = here if position is None else f"{here}.{position}"
            yield from _unknown(root, typing.cast(type[BaseModel], section), item, f"{inner}.")


def _hint(root: type[BaseModel], key: str, model: type[BaseModel]) -> str:
    """Where an option of this name stands in another section, or what is close in this one."""
    elsewhere = [name for name in _option_names(root) if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return close_match_hint(key, model.model_fields)


def _option_names(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted names of all options, those of lists left out."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _option_names(section, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as `list[EnvConfig]`, if there is one."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(_section_of, typing.get_args(annotation))), None)


def explain(error: Mapping[str, typing.Any]) -> str:
    """Field, given value and remedy from one pydantic error."""
    field = ".".join(str(part) for part in error["loc"]) or "configuration"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, MooredError | ValueError):
        return f"{field}: {cause}"
    return f"{field} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
