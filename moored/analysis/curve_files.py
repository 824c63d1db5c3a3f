"""Curve files: the curves of many finished runs in one JSON file, small enough to keep.

`moored study NAME --curves FILE` writes one. It holds, for each arm and seed, every curve as pairs
of step and value, beside the command, versions and machine. Figures, the alarm's operating curve
and correlations are made from such files, without run directories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moored.errors import ConfigError, MooredError
from moored.runlog.log import read_records, write_atomically

STEP_CURVES = {
    "success": "rollout/success_rate",
    "reward": "rollout/reward_mean",
    "validity": "rollout/validity_rate",
    "reply tokens": "rollout/reply_tokens_mean",
    "kept": "filter/kept_fraction",
    "reward variance": "rollout/reward_variance_mean",
    "Std/Mean of RV": "rollout/reward_variance_std_over_mean",
    "token entropy": "learner/entropy",
    "outcome-free share": "signal/outcome_free_share",
}
LOOK_CURVES = {
    "retrieval": "retrieval_accuracy",
    "MI": "mi_estimate",
    "MI of sequences": "mi_seq_estimate",
    "MI z-score": "mi_zscore",
    "MI z-score of sequences": "mi_zscore_seq",
    "H(Z|X)": "conditional_entropy_est",
    "H(Z)": "reasoning_entropy_est",
    "MI, error": "mi_estimate_se",
}
VIEWS = {
    "": "collapse_first_turn_sample",
    "swap": "collapse_observation_swap_sample",
    "episode": "collapse_episode_swap_sample",
}
"""What is added to the name of a curve -> the view that it was measured in."""
DIGITS = 6
"""Significant digits of a stored value."""

Curve = Sequence[tuple[int, float]]
"""Steps and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The curves of one finished run."""

    seed: int
    alarm_step: int | None
    curves: Mapping[str, Curve]
    """By name; one that was not measured is empty or missing."""

    @property
    def last_step(self) -> int:
        return self.curves["success"][-1][0]

    def followed(self, name: str) -> Curve:
        """A curve of a look in the view that the alarm follows: the swaps if measured."""
        measured = (v for v in ("episode", "swap") if self.curves.get(look_curve("MI", v)))
        return self.curves.get(look_curve(name, next(measured, "")), ())


def look_curve(name: str, view: str) -> str:
    """`MI` and `MI, error` in the view `swap` are `MI, swap` and `MI, swap, error`."""
    if not view:
        return name
    first, sep, rest = name.partition(",")
    return f"{first}, {view}{sep}{rest}"


def read_curve_file(file: Path) -> dict[str, list[StoredRun]]:
    """Runs by arm; raises for a file that is not a curve file."""
    try:
        runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
        found = {arm: [_stored(run) for run in of_arm] for arm, of_arm in runs.items()}
        if not found or not all(found.values()):
            raise ValueError("an arm without a run" if found else "no runs")
        return found
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{str(file)!r} is not a curve file ({type(error).__name__}: {error}); "
            f"`moored study NAME --curves FILE` writes one"
        ) from error


def _stored(run: Mapping[str, Any]) -> StoredRun:
    curves = {
        name: [(int(step), float(value)) for step, value in curve]
        for name, curve in run["curves"].items()
    }
    if not curves["success"]:
        raise ValueError("a run without a step")
    if not all(math.isfinite(value) for curve in curves.values() for _, value in curve):
        raise ValueError("a value that is not finite")
    alarm_step = None if run["alarm_step"] is None else int(run["alarm_step"])
    return StoredRun(seed=int(run["seed"]), alarm_step=alarm_step, curves=curves)


def read_run_curves(path: Path, seed: int) -> StoredRun:
    """The curves of a run directory, for a curve file."""
    steps, looks = read_records(path), read_records(path, "collapse")
    curves = {name: _curve(steps, key) for name, key in STEP_CURVES.items()}
    for suffix, view in VIEWS.items():
        for name, key in LOOK_CURVES.items():
            curves[look_curve(name, suffix)] = _curve(looks, f"{view}/{key}")
    if not curves["success"]:
        raise MooredError(f"{str(path)!r} has no finished step")
    alarms = [look["step"] for look in looks if look.get("alarm")]
    alarm_step = int(str(alarms[0])) if alarms else None
    measured = {name: curve for name, curve in curves.items() if curve}
    return StoredRun(seed=seed, alarm_step=alarm_step, curves=measured)


def _curve(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    return [
        (int(record["step"]), float(f"{record[key]:.{DIGITS}g}"))
        for record in records
        if isinstance(record.get(key), int | float)
    ]


def write_curve_file(
    file: Path, runs: Mapping[str, Sequence[StoredRun]], about: Mapping[str, object]
) -> None:
    """Store runs by arm; `about` says how they were made: command, versions, hardware."""
    found = {
        arm: [
            {"seed": run.seed, "alarm_step": run.alarm_step, "curves": dict(run.curves)}
            for run in of_arm
        ]
        for arm, of_arm in runs.items()
    }
    write_atomically(file, json.dumps({**about, "runs": found}) + "\n")


def up_to_shortest(runs: Mapping[str, Sequence[StoredRun]]) -> dict[str, list[StoredRun]]:
    """All runs up to the step that every one of them has reached."""
    last = min(run.last_step for of_arm in runs.values() for run in of_arm)
    return {arm: [_cut(run, last) for run in of_arm] for arm, of_arm in runs.items()}


def _cut(run: StoredRun, last: int) -> StoredRun:
    curves = {
        name: [(step, value) for step, value in curve if step <= last]
        for name, curve in run.curves.items()
    }
    alarm = run.alarm_step if run.alarm_step is not None and run.alarm_step <= last else None
    return replace(run, curves=curves, alarm_step=alarm)
