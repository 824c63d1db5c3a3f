"""Ready-made configurations; several are laid over each other: `moored train sokoban grpo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml

from moored.errors import ConfigError, close_match_hint

HERE = Path(__file__).parent

Kind = Literal["environment", "algorithm", "filter", "run"]
"""What a preset is about; a `run` sets a bit of everything, and others may be laid over it."""


def preset_names() -> list[str]:
    """Every preset that ships with the package."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def describe_presets() -> dict[str, str]:
    """The first comment line of each preset."""
    found = {}
    for name in preset_names():
        first = (HERE / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        found[name] = first.removeprefix("# ")
    return found


def preset_kinds() -> dict[str, Kind]:
    """The kind of each preset, which follows from what it sets."""
    return {name: _kind_of(_read(name)) for name in preset_names()}


def read_presets(names: Sequence[str]) -> dict[str, object]:
    """Lay presets and YAML files over each other; later ones win, key by key.

    Two presets of one kind are refused: the second would silently replace the first.
    """
    _check_kinds(names)
    merged: dict[str, object] = {}
    for name in names:
        merged = _merge(merged, _read(name))
    return merged


def _kind_of(preset: Mapping[str, object]) -> Kind:
    sections = set(preset)
    if sections == {"env"}:
        return "environment"
    if sections == {"filter"}:
        return "filter"
    return "algorithm" if sections <= {"algorithm", "filter"} else "run"


def _check_kinds(names: Sequence[str]) -> None:
    seen: dict[Kind, str] = {}
    for name in names:
        if name not in preset_names():
            continue
        kind = _kind_of(_read(name))
        other = seen.setdefault(kind, name)
        if other != name:
            advice = f"choose one of {other!r} and {name!r}"
            if kind == "environment":
                advice += f", or mix them: 'env=[{other}, {name}]'"
            raise ConfigError(f"two presets are of the kind {kind!r}; {advice}")


def _read(name: str) -> dict[str, object]:
    is_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else HERE / f"{name}.yaml"
    if not path.is_file():
        if is_file:
            raise ConfigError(f"configuration file {name!r} does not exist; {_file_hint(path)}")
        hint = close_match_hint(name, preset_names())
        raise ConfigError(f"unknown preset {name!r}; {hint} (or give a .yaml file)")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{str(path)!r} must hold keys and values")
    return dict(data)


def _file_hint(path: Path) -> str:
    """Which file next to `path` may be meant."""
    others = [str(other) for other in path.parent.glob("*.y*ml")]
    return close_match_hint(str(path), others) if others else "check the path"


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merge(old, value)
        result[key] = value
    return result
