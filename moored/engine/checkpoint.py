"""Folders of a run that are whole or not there at all: checkpoints above all.

A folder is written beside its place and renamed into it, so a kill at any moment leaves either the
old ones or the new one as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from moored.engine.base import Learner
from moored.errors import RunLogError

KEEP = 2


@contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """An empty folder to write to; it takes the place of `final` when the block ends well."""
    beside, old = (final.with_name(f".{what}_{final.name}") for what in ("writing", "old"))
    try:
        if old.exists() and not final.exists():
            # A kill between the two renames below.
            old.replace(final)
        # What a kill left behind, of any step.
        for stale in [*final.parent.glob(".writing_*"), old]:
            shutil.rmtree(stale, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        if final.exists():
            final.replace(old)
        beside.replace(final)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunLogError(f"cannot write {str(final)!r}: {why}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save_checkpoint(run: Path, step: int, learner: Learner, state: Mapping[str, Any]) -> Path:
    """Write weights, optimiser and the loop's own state; keep the newest `KEEP` checkpoints."""
    final = run / "checkpoints" / f"step_{step:06d}"
    with written_whole(final) as folder:
        learner.save(folder)
        (folder / "state.json").write_text(json.dumps({"step": step, **state}) + "\n")
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


def newest_checkpoint(run: Path) -> Path:
    """Folder of the newest checkpoint."""
    found = _checkpoints(run)
    if not found:
        raise RunLogError(f"{str(run)!r} has no checkpoint yet; let it run further first")
    return found[-1]


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))
