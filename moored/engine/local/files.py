"""The folder of a checkpoint: whole tensors of one process, or shards of several ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from moored.engine.local.state import Trained, load_weights

POLICY = "policy"
"""The name of its files."""
SHARDS = "shards"


def save_whole(folder: Path, trained: Sequence[Trained], version: int) -> None:
    """Write weights and optimiser states: what is needed to go on as if nothing had happened."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in trained:
        each.save(folder)
    write_version(folder, version)


def load_saved(
    folder: Path, trained: Sequence[Trained], policy: nn.Module, *, policy_only: bool
) -> int:
    """Go back to what one process or several ranks saved; returns the number of updates."""
    if has_shards(folder):
        # Importing it takes a second.
        from moored.engine.fsdp.checkpoint import load_sharded_weights, load_shards

        if policy_only:
            load_sharded_weights(folder, POLICY, policy)
        else:
            load_shards(folder, trained)
    elif policy_only:
        load_weights(policy, folder / f"{POLICY}.safetensors")
    else:
        for each in trained:
            each.load(folder)
    return read_version(folder)


def has_shards(folder: Path) -> bool:
    return (folder / SHARDS).is_dir()


def write_version(folder: Path, version: int) -> None:
    """Store the number of updates."""
    (folder / "learner.json").write_text(json.dumps({"version": version}) + "\n")


def read_version(folder: Path) -> int:
    return json.loads((folder / "learner.json").read_text())["version"]
