"""Data of a configuration, from YAML files and `key=value`, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from moored.errors import ConfigError, close_match_hint


def read_yaml(path: str | Path) -> dict[str, object]:
    """Keys and values of a configuration file."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {str(path)!r}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"configuration {str(path)!r} is not valid YAML: {what}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"configuration {str(path)!r} must hold keys and values, got {data!r}")
    return dict(data)


def explain(root: type[BaseModel], item: ErrorDetails) -> str:
    """Field, given value and remedy of one mistake in a whole configuration."""
    field = ".".join(map(str, item["loc"])) or "configuration"
    if item["type"] == "extra_forbidden":
        return f"unknown option {field!r}; {_hint(root, item['loc'])}"
    if "error" in item.get("ctx", {}):  # a validator's own
        return f"{field}: {item['msg'].removeprefix('Value error, ')}"
    return f"{field} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _hint(root: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Where an option of this name stands in another section, or what is close in this one."""
    *sections, key = loc
    elsewhere = [name for name in _option_names(root) if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    model = root
    for name in sections:
        if isinstance(name, str):
            model = _section_of(model.model_fields[name].annotation) or model
    return close_match_hint(str(key), model.model_fields)


def _option_names(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted names of all options, those of lists left out."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _option_names(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as `list[EnvConfig]`, if there is one."""
    inside = [annotation, *get_args(annotation)]
    # `list[EnvConfig]` passes for a type, too.
    classes = [kind for kind in inside if isinstance(kind, type) and get_origin(kind) is None]
    return next((kind for kind in classes if issubclass(kind, BaseModel)), None)


def set_option(
    data: Mapping[str, object], override: str, defaults: Mapping[str, object]
) -> dict[str, object]:
    """`data` with one dotted key set: `filter.value=0.8`, `env.0.weight=2`; values are YAML.

    A list that `data` does not have is copied from `defaults`.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} must look like section.option=value")
    value = parse_value(text, override)
    return cast(dict[str, object], _set(data, defaults, keys, value, dotted))


def parse_value(text: str, given: str) -> object:
    """Read the right side of `key=value`: a JSON or YAML value; `given` is named in the error."""
    try:
        return json.loads(text)  # YAML alone reads 1e-3 as text
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{given!r}: {text!r} is not a valid YAML value") from None


def _set(node: object, default: object, keys: list[str], value: object, dotted: str) -> object:
    """A copy of `node` with the value at `keys` replaced.

    A list that is not given is copied from its default; of a section only what is set is kept, so
    that defaults may follow other options.
    """
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if node is None and not isinstance(default, Mapping):
        node = default
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise ConfigError(
                f"override {dotted!r}: {key!r} is not a position in a list of {len(node)}; "
                f"count from 0"
            )
        copy = list(node)
        copy[int(key)] = _set(node[int(key)], None, rest, value, dotted)
        return copy
    if not isinstance(node, Mapping | None):
        raise ConfigError(f"override {dotted!r}: {node!r} is a value, it has no key {key!r}")
    node, defaults = node or {}, default if isinstance(default, Mapping) else {}
    return {**node, key: _set(node.get(key), defaults.get(key), rest, value, dotted)}
