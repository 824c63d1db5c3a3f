"""Ready-made configurations; several are laid over each other: `moored train sokoban grpo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from moored.config_text import read_yaml
from moored.errors import ConfigError, close_match_hint

HERE = Path(__file__).parent

Kind = Literal["environment", "algorithm", "filter", "model", "run"]
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
    if sections <= {"algorithm", "filter"}:
        return "algorithm"
    return "model" if "model" in sections and "env" not in sections else "run"


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
    if name in preset_names():
        return read_yaml(HERE / f"{name}.yaml")
    path = Path(name)
    if path.is_dir() and (path / "config.yaml").is_file():
        raise ConfigError(f"{name!r} is a folder; did you mean {str(path / 'config.yaml')!r}?")
    if path.is_dir():
        raise ConfigError(f"{name!r} is a folder; give a preset or a .yaml file")
    if path.is_file() or name.endswith((".yaml", ".yml")):
        return read_yaml(_existing(path))
    hint = close_match_hint(name, preset_names())
    raise ConfigError(f"unknown preset {name!r}; {hint} (or give a .yaml file)")


def _existing(path: Path) -> Path:
    """The file, or an error that names a file or preset of a similar name."""
    if path.is_file():
        return path
    # By their stems: the ending alone would make all names alike.
    known = {name: name for name in preset_names()}
    known |= {file.stem: str(file) for file in path.parent.glob("*.y*ml") if file.is_file()}
    close = get_close_matches(path.stem, known, n=1)
    hint = f"did you mean {known[close[0]]!r}?" if close else "check the path"
    raise ConfigError(f"configuration file {str(path)!r} does not exist; {hint}")


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merge(old, value)
        result[key] = value
    return result
