"""From text to the data of a configuration: YAML files and `key=value`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml

from moored.errors import ConfigError


def read_yaml(path: str | Path) -> dict[str, object]:
    """Keys and values of a configuration file."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration {str(path)!r} is not text in UTF-8; save it again as such"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"configuration {str(path)!r} is not valid YAML: {_yaml_problem(error)}"
        ) from error
    if not isinstance(data, Mapping):
        found = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(f"configuration {str(path)!r} must hold keys and values, but it {found}")
    return dict(data)


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Place and reason in one line, with what to do about a tab."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    remedy = "indent with spaces" if "'\\t'" in problem else "correct it there"
    return f"{where}{problem}; {remedy}"


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
