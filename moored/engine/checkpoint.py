"""Checkpoints of a run: whole or not there at all.

A checkpoint is written beside its place and renamed into it, so a kill at any moment leaves either
the old ones or the new one as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.engine.base import Learner
from moored.errors import RunLogError

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 2


def save_checkpoint(run: Path, step: int, learner: Learner, state: Mapping[str, Any]) -> Path:
    """Write weights, optimiser and the loop's own state; keep the newest `KEEP` checkpoints."""
    folder = run / "checkpoints"
    final = folder / f"step_{step:06d}"
    beside = folder / f".writing_{step:06d}"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        learner.save(beside)
        (beside / "state.json").write_text(json.dumps({"step": step, **state}) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        beside.replace(final)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunLogError(f"cannot write checkpoint {str(final)!r}: {error.strerror}") from error
    for old in _checkpoints(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(run: Path, learner: Learner) -> dict[str, Any] | None:
    """Bring the learner to the newest checkpoint and return its state; None when there is none."""
    found = _checkpoints(run)
    if not found:
        return None
    learner.load(found[-1])
    return json.loads((found[-1] / "state.json").read_text())


def newest_weights(run: Path) -> dict[str, Tensor]:
    """The policy of the newest checkpoint, for evaluation."""
    from safetensors.torch import load_file

    found = _checkpoints(run)
    if not found:
        raise RunLogError(f"{str(run)!r} has no checkpoint yet; let it run further first")
    return load_file(found[-1] / "policy.safetensors")


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))
