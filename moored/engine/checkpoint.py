"""Checkpoints of a run: everything `resume` needs, each in a folder that is complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moored.engine.base import Learner
from moored.errors import RunLogError
from moored.runlog.log import written_whole

KEEP = 2
"""Checkpoints of a run that does not say how many."""


def save_checkpoint(
    run: Path,
    step: int,
    learner: Learner,
    state: Mapping[str, Any],
    *,
    also: Callable[[Path], None] | None = None,
    keep: int = KEEP,
) -> Path:
    """Write weights, optimiser and the loop's own state; keep the newest `keep`, at least this one.

    `also` may write more files into the folder.
    """
    final = run / "checkpoints" / f"step_{step:06d}"
    with written_whole(final) as folder:
        learner.save(folder)
        if also is not None:
            also(folder)
        (folder / "state.json").write_text(json.dumps({"step": step, **state}) + "\n")
    for old in _checkpoints(run)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def remove_checkpoints(run: Path) -> None:
    """Keep only the model that a run has ended with; a kill leaves all checkpoints or none."""
    gone = (run / "checkpoints").rename(run / ".removed_checkpoints")
    shutil.rmtree(gone, ignore_errors=True)


def has_only_model(run: Path) -> bool:
    """True when a run has finished and its checkpoints were removed."""
    return (run / "model" / "config.json").is_file() and not _checkpoints(run)


def load_checkpoint(run: Path, learner: Learner) -> dict[str, Any] | None:
    """Bring the learner to the newest checkpoint and return its state; None when there is none."""
    found = _checkpoints(run)
    if not found:
        return None
    file = found[-1] / "state.json"
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunLogError(
            f"{str(file)!r} is damaged or missing ({error}); delete the folder "
            f"{file.parent.name!r}, then the checkpoint before it is used"
        ) from error
    learner.load(found[-1])
    return state


def newest_checkpoint(run: Path) -> Path:
    """Folder of the newest checkpoint."""
    found = _checkpoints(run)
    if not found:
        raise RunLogError(f"{str(run)!r} has no checkpoint yet; let it run further first")
    return found[-1]


def find_checkpoint(run: Path, step: int) -> Path:
    """Folder of the checkpoint after this step."""
    newest_checkpoint(run)
    found = {checkpoint_step(folder): folder for folder in _checkpoints(run)}
    if step not in found:
        known = ", ".join(map(str, found))
        raise RunLogError(
            f"{str(run)!r} has no checkpoint of step {step}; it has those of steps {known}"
        )
    return found[step]


def checkpoint_step(folder: Path) -> int:
    """Steps that were done when it was written."""
    return int(folder.name.removeprefix("step_"))


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))
