"""What a failed step was working on, kept for inspection: `RUN/failed/step_000012`.

`failure.json` has the error, the tasks, and names of damaged weights; an update that was not finite
also leaves its statistics and its minibatch, as arrays `0/prompt_ids`, `0/advantages_T`, … of
sample 0 and so on in `samples.npz`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from moored.engine.base import Learner
from moored.errors import MooredError, RunLogError
from moored.rollout.episodes import Task
from moored.runlog.log import written_whole
from moored.training.samples import LossSample, Sample
from moored.training.update import NotFiniteError


def keep_failure(
    run: Path, step: int, error: MooredError, learner: Learner, tasks: Sequence[Task]
) -> MooredError:
    """Save what the step was working on; returns the error that says where."""
    if isinstance(error, RunLogError):
        return error
    update = error if isinstance(error, NotFiniteError) else None
    record = {
        "step": step,
        "error": str(error),
        "policy_version": learner.version,
        "weights_not_finite": _damaged_weights(learner),
        # As text, since JSON has no NaN.
        "stats": {name: str(value) for name, value in update.stats.items()} if update else {},
        "tasks": [{"env": task.env, "task_seed": task.task_seed} for task in tasks],
    }
    final = run / "failed" / f"step_{step:06d}"
    try:
        with written_whole(final) as folder:
            (folder / "failure.json").write_text(json.dumps(record, indent=2) + "\n")
            if update is not None:
                np.savez_compressed(folder / "samples.npz", **_arrays(update.samples))  # pyright: ignore[reportArgumentType]
        where = f"is kept in {str(final)!r}"
    except RunLogError as lost:
        where = f"is lost: {lost}"
    return MooredError(f"step {step}: {error}. What it was working on {where}")


def _damaged_weights(learner: Learner) -> list[str] | None:
    """None where the learner cannot be asked any more, e.g. because of the same error."""
    try:
        return learner.damaged_weights()
    except MooredError:
        return None


def _arrays(samples: Sequence[LossSample]) -> dict[str, np.ndarray]:
    """Every array of every sample, by sample and field."""
    arrays: dict[str, np.ndarray] = {}
    for number, given in enumerate(samples):
        arrays[f"{number}/prompt_ids"] = given.sample.prompt.ids
        for part, kind in ((given.sample, Sample), (given, LossSample)):
            names = [item.name for item in fields(kind) if item.name.endswith("_T")]
            found = {f"{number}/{name}": getattr(part, name) for name in names}
            arrays |= {name: array for name, array in found.items() if array is not None}
    return arrays
