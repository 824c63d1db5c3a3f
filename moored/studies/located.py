"""YAML whose every value knows its line, so that a mistake in a file can be pointed at.

Keys are taken as they are written: `0.9` and `off` are names of arms, not a number and a switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from moored.errors import ConfigError

Kind = TypeVar("Kind")

KINDS = {dict: "keys and values", list: "a list", str: "text", int: "a whole number"}


@dataclass(frozen=True, slots=True)
class Located:
    """A value of a file: a mapping of names to `Located`, a list of them, or a plain value."""

    value: object
    file: Path
    line: int
    """From 1. Of a value in a mapping: the line of its key."""

    def error(self, problem: str) -> ConfigError:
        """An error that names the place."""
        return ConfigError(f"{str(self.file)!r}, line {self.line}: {problem}")

    def as_kind(self, kind: type[Kind], what: str) -> Kind:
        """The value, or an error when it is of another kind."""
        if not isinstance(self.value, kind) or isinstance(self.value, bool):
            given = {dict: "keys and values", list: "a list"}.get(type(self.value))
            raise self.error(f"{what} must be {KINDS[kind]}, got {given or repr(self.value)}")
        return self.value

    def items(self, what: str) -> Mapping[str, Located]:
        """The entries of a mapping."""
        return self.as_kind(dict, what)


def read_located(file: Path) -> Located:
    """A YAML file; a key that occurs twice is an error."""
    try:
        text = file.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{str(file)!r} is empty; see docs/studies.md for what it must hold")
        return _locate(loader, node, file, node.start_mark.line + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(file)!r} is not text in UTF-8; save it again as such") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{str(file)!r} is not valid YAML: {_problem(error)}") from error


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return f"{where}{getattr(error, 'problem', None) or ' '.join(str(error).split())}"


def _locate(loader: yaml.SafeLoader, node: yaml.Node, file: Path, line: int) -> Located:
    if isinstance(node, yaml.MappingNode):
        return Located(_entries(loader, node, file), file, line)
    if isinstance(node, yaml.SequenceNode):
        items = [_locate(loader, item, file, item.start_mark.line + 1) for item in node.value]
        return Located(items, file, line)
    return Located(loader.construct_object(node), file, line)


def _entries(loader: yaml.SafeLoader, node: yaml.MappingNode, file: Path) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "a key"
        if name in found:
            raise ConfigError(
                f"{str(file)!r}, line {line}: {name!r} stands there a second time, first in line "
                f"{found[name].line}; give each its own name"
            )
        found[name] = _locate(loader, value, file, line)
    return found
