"""Curves of finished runs: success and diagnostics by step, from run directories or curve files.

A curve file holds the curves of many runs in one JSON file, small enough to keep: for each arm and
seed, every curve as pairs of step and value, beside the command, versions and machine. `moored
study NAME --curves FILE` writes one. Figures, the alarm's operating curve and correlations are made
from such files, without run directories. A run that is there twice counts once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from moored.analysis.compare import LAST, compared_options, read_options
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

LOOK_DIAGNOSTICS = {
    "MI": "mi_estimate",
    "MI of sequences": "mi_seq_estimate",
    "MI z-score": "mi_zscore",
    "MI z-score of sequences": "mi_zscore_seq",
    "MI z-score, smoothed": "mi_zscore_ema",
    "H(Z|X)": "conditional_entropy_est",
    "H(Z|X) of sequences": "conditional_entropy_seq_est",
    "H(Z)": "reasoning_entropy_est",
    "H(Z) of sequences": "reasoning_entropy_seq_est",
    "retrieval": "retrieval_accuracy",
}
"""Of the view that regime and alarm follow."""
STEP_DIAGNOSTICS = {name: key for name, key in STEP_CURVES.items() if name != "success"}

Curve = Sequence[tuple[int, FiniteFloat]]
"""Steps and values."""
ByStep = Mapping[int, float]


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


CURVE_FILE = TypeAdapter(dict[str, Annotated[list[StoredRun], Field(min_length=1)]])


def read_curve_file(file: Path) -> dict[str, list[StoredRun]]:
    """Runs by arm; raises for a file that is not a curve file."""
    try:
        found = CURVE_FILE.validate_python(json.loads(file.read_text(encoding="utf-8"))["runs"])
        if not found or not all(run.curves["success"] for runs in found.values() for run in runs):
            raise ValueError("no runs, or one without a step")
        return found
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{str(file)!r} is not a curve file; `moored study NAME --curves FILE` writes one"
        ) from error


def read_run_curves(path: Path, seed: int) -> StoredRun:
    """The curves of a run directory, for a curve file."""
    steps, looks = read_records(path), read_records(path, "collapse")
    curves = {name: _pairs(steps, key) for name, key in STEP_CURVES.items()}
    for suffix, view in VIEWS.items():
        for name, key in LOOK_CURVES.items():
            curves[look_curve(name, suffix)] = _pairs(looks, f"{view}/{key}")
    if not curves["success"]:
        raise MooredError(f"{str(path)!r} has no finished step")
    alarms = [look["step"] for look in looks if look.get("alarm")]
    alarm_step = int(str(alarms[0])) if alarms else None
    measured = {name: curve for name, curve in curves.items() if curve}
    return StoredRun(seed=seed, alarm_step=alarm_step, curves=measured)


def _pairs(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """As they are stored."""
    return [(step, float(f"{value:.{DIGITS}g}")) for step, value in _curve(records, key).items()]


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


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """One run: success by step, and each diagnostic by the step of its look."""

    name: str
    setting: str
    """Equal in runs that differ in their seed only."""
    arm: str
    """How groups were filtered."""
    success: ByStep
    diagnostics: Mapping[str, ByStep]

    def final(self, name: str) -> float | None:
        """Mean of a diagnostic over the last steps; None when it was not measured there.

        Of looks that are further apart than that, the last one.
        """
        last, curve = max(self.success), self.diagnostics.get(name, {})
        values = [v for step, v in curve.items() if step > last - LAST]
        if not values and curve and name in LOOK_DIAGNOSTICS:
            return curve[max(curve)]
        return fmean(values) if values else None

    @property
    def final_success(self) -> float:
        last = max(self.success)
        return fmean(v for step, v in self.success.items() if step > last - LAST)

    @cached_property
    def smooth_success(self) -> ByStep:
        """Mean over a step, which alone is noisy, and two on either side, where all five are."""
        near = {step: range(step - 2, step + 3) for step in self.success}
        return {
            step: fmean(self.success[s] for s in steps)
            for step, steps in near.items()
            if all(s in self.success for s in steps)
        }


def read_all(sources: Sequence[Path]) -> tuple[list[RunCurves], dict[str, str]]:
    """All runs in folders and curve files; and which were left out, and why."""
    curves, left_out = [], {}
    for source in sources:
        if source.is_file():
            curves += read_stored(source)
            continue
        configs = sorted(source.rglob("config.yaml"))
        if not configs:
            raise ConfigError(
                f"{str(source)!r} holds no run; give the folder of a study or a curve file"
            )
        for config in configs:
            try:
                curves.append(read_curves(config.parent))
            except MooredError as error:
                left_out[str(config.parent)] = str(error)
    kept, repeats = without_repeats(curves)
    return kept, left_out | repeats


def read_curves(path: Path) -> RunCurves:
    """Curves of one run directory; raises where it has no finished step."""
    steps: Sequence[Any] = read_records(path)
    looks: Sequence[Any] = read_records(path, "collapse")
    success = _curve(steps, STEP_CURVES["success"])
    if not success:
        raise MooredError(f"{str(path)!r} has no finished step")
    found = {name: _curve(steps, key) for name, key in STEP_DIAGNOSTICS.items()}
    followed = [{"step": look["step"], **_followed(look)} for look in looks]
    found |= {name: _curve(followed, key) for name, key in LOOK_DIAGNOSTICS.items()}
    options = read_options(path)
    return RunCurves(
        name=str(path),
        setting=json.dumps(compared_options(options), sort_keys=True, default=str),
        arm=_arm(options),
        success=success,
        diagnostics={name: curve for name, curve in found.items() if curve},
    )


def read_stored(file: Path) -> list[RunCurves]:
    """Curves of all runs in a curve file; the runs of one combination of arms are one setting.

    Of several factors the last one is the filter, as in all studies of the package."""
    return [
        RunCurves(
            name=f"{file.stem}/{arm}/seed-{run.seed}",
            setting=f"{file.stem}/{arm}",
            arm=arm.rpartition("/")[2],
            success=dict(run.curves["success"]),
            diagnostics=_stored_diagnostics(run),
        )
        for arm, runs in read_curve_file(file).items()
        for run in runs
    ]


def _stored_diagnostics(run: StoredRun) -> dict[str, ByStep]:
    found = {name: dict(run.curves.get(name, ())) for name in STEP_DIAGNOSTICS}
    found |= {name: dict(run.followed(name)) for name in LOOK_DIAGNOSTICS}
    # Older files have retrieval of the first turn only, and not H(Z), which is a sum.
    found["retrieval"] = found["retrieval"] or dict(run.curves.get("retrieval", ()))
    if not found["H(Z)"]:
        found["H(Z)"] = {
            step: mi + found["H(Z|X)"][step]
            for step, mi in found["MI"].items()
            if step in found["H(Z|X)"]
        }
    return {name: curve for name, curve in found.items() if curve}


def without_repeats(runs: Sequence[RunCurves]) -> tuple[list[RunCurves], dict[str, str]]:
    """Leave out a run that is the beginning of another, step by step: the same run, made twice."""
    kept: list[RunCurves] = []
    repeats = {}
    for run in sorted(runs, key=lambda run: -len(run.success)):
        longer = next((other for other in kept if _begins(other, run)), None)
        if longer is None:
            kept.append(run)
        else:
            repeats[run.name] = f"the same run as {longer.name}, up to step {max(run.success)}"
    order = {id(run): place for place, run in enumerate(runs)}
    return sorted(kept, key=lambda run: order[id(run)]), repeats


def _begins(longer: RunCurves, run: RunCurves) -> bool:
    """Success and the other figures of all steps are equal; all zeros say nothing."""
    if len(set(run.success.values())) < 2:
        return False
    names = STEP_DIAGNOSTICS.keys() & run.diagnostics.keys() & longer.diagnostics.keys()
    pairs = [(run.success, longer.success)]
    pairs += [(run.diagnostics[name], longer.diagnostics[name]) for name in names]
    return all(part.items() <= whole.items() for part, whole in pairs)


def _arm(options: Mapping[str, object]) -> str:
    """The rule of the filter, as studies name their arms."""
    rule = str(options.get("filter.rule", "unknown"))
    return rule if options.get("filter.largest", True) else f"{rule}_smallest"


def _followed(look: Mapping[str, Any]) -> Mapping[str, Any]:
    """The report that the verdict rests on; of several environments, the first one's."""
    for environment in look.get("environments", {}).values():
        return look["reports"].get(environment["view"], {})
    return {}


def _curve(records: Sequence[Any], key: str) -> dict[int, float]:
    return {
        int(record["step"]): float(record[key])
        for record in records
        if isinstance(record.get(key), int | float)
    }
