"""Options that differ from one start of a run to the next: which may, and which did."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moored.config import Config, Options, load_config
from moored.errors import ConfigError
from moored.names import file_of

FIXED = {
    "seed": "tasks and samples of every step derive from it",
    "model": "the weights come from the checkpoint",
    "env": "steps before and after would not be about the same tasks",
    "rollout.num_groups": "tasks are counted by it, and MI depends on the number of prompts",
    "algorithm.name": "the checkpoint holds what this algorithm trains",
    "algorithm.advantage": "the checkpoint holds what this estimator trains",
    "optimizer.lora_rank": "the checkpoint holds weights of this shape",
    "optimizer.lora_alpha": "the checkpoint holds weights that were trained with this factor",
    "filter.max_refills": "tasks are counted by it",
    "collapse.num_prompts": "MI depends on the number of prompts",
    "engine.kind": "the checkpoint was written by this engine",
}
"""Options that stay as they were when a run is resumed, and why."""
EXCHANGEABLE = {"engine.kind": ("local", "torchrun", "ray")}
"""Values among which they may change all the same: these read each other's checkpoints."""


@dataclass(frozen=True, slots=True)
class Change:
    """An option before and after."""

    old: object
    new: object

    def values(self) -> tuple[object, object]:
        return self.old, self.new


def changes_since(run: Path, config: Config) -> dict[str, Change]:
    """What `config` changes in the run's own; raises for an option that must stay."""
    changes = changed_options(load_config(run / "config.yaml"), config)
    for name, change in changes.items():
        is_exchange = all(value in EXCHANGEABLE.get(name, ()) for value in change.values())
        if name in FIXED and not is_exchange and not is_moved(*change.values()):
            raise ConfigError(
                f"{name} cannot change when a run is resumed ({change.old!r} to {change.new!r}): "
                f"{FIXED[name]}; leave it out, or start a new run with model={run / 'model'}"
            )
    return changes


def is_moved(old: object, new: object) -> bool:
    """True where the two differ in paths alone, of which the old ones are gone and the new exist.

    A relative path in an older `config.yaml` is one from the current folder.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(is_moved(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_moved, old, new))
    if not isinstance(old, str) or not isinstance(new, str) or old == new:
        return old == new
    is_gone = os.path.isabs(old) and not os.path.exists(file_of(old))
    return os.path.exists(file_of(new)) and (is_gone or new == os.path.abspath(old))


def changed_options(before: Options, after: Options) -> dict[str, Change]:
    """What differs between two configurations of one kind, by dotted name."""
    old, new = flat_options(before), flat_options(after)
    return {name: Change(old[name], new[name]) for name in new if old[name] != new[name]}


def flat_options(config: Options) -> dict[str, object]:
    """Every option by its dotted name; the list of environments is one."""
    return dict(_flatten(config.model_dump(mode="json"), ""))


def _flatten(section: Mapping[str, object], path: str) -> list[tuple[str, object]]:
    found = []
    for key, value in section.items():
        name = f"{path}{key}"
        found += _flatten(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found
