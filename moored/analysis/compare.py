"""The ends of several runs side by side, with intervals and the options they differ in, and what
they wrote about the same tasks.

Reads run directories only. Runs that differ in nothing but their seed are put together, and their
intervals are over seeds. A single run has an interval over its last steps; these depend on each
other, so it is narrower than one over seeds would be.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, cast

from moored.analysis.excerpts import differing_parts
from moored.config_text import read_yaml
from moored.errors import MooredError
from moored.runlog.log import lost_episodes, read_records
from moored.runlog.rollouts import read_groups
from moored.types import Group, content_text

LAST = 10
"""Steps at either end of a run that are averaged, unless told otherwise."""
STEP_FIGURES = {
    "training loss": "train/loss",
    "held-out loss": "evaluation/loss",
    "success": "rollout/success_rate",
    "reward": "rollout/reward_mean",
    "well-formed replies": "rollout/validity_rate",
    "validation success": "evaluation/success_rate",
}
LOOK_FIGURES = {
    "MI": "mi_estimate",
    "H(Z|X)": "conditional_entropy_est",
    "retrieval": "retrieval_accuracy",
}
"""Of the report in collapse.jsonl that regime and alarm of an environment follow."""
NOT_COMPARED = ("seed", "profile", "checkpoint_every", "keep_checkpoints", "log", "run_id")
"""Options in which repeated runs may differ."""
CHANGED_FREELY = (*NOT_COMPARED, "num_steps")
"""Options whose change in the middle of a run changes none of its steps."""
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t for 1, 2, … 30 degrees of freedom."""

ABSENT = "–"
"""Stands for the value of an option that a run does not have."""

Record = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a run, or of several that are repeats of each other."""

    start: float | None
    """Mean over the first steps."""
    end: float
    """Mean over the last steps."""
    half_width: float | None
    """Of the 95 % interval around `end`; None with one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnds:
    """What one run directory holds about the start and the end of its run."""

    path: Path
    last_step: int
    num_averaged: int
    """Steps at either end."""
    starts: Mapping[str, float]
    ends: Mapping[str, Sequence[float]]
    """Figure -> its values in the last steps."""
    verdict: str | None
    """Of the last look."""
    alarm_step: int | None
    num_lost: int
    """Episodes that ended in an error."""
    options: Mapping[str, object]
    """Dotted name -> value; empty without a readable config.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[RunEnds, ...]

    @property
    def interval_over(self) -> Literal["seeds", "steps"]:
        return "seeds" if len(self.runs) > 1 else "steps"

    @property
    def seeds(self) -> list[object]:
        return [run.options.get("seed") for run in self.runs]

    def figures(self) -> dict[str, Figure]:
        """All figures that at least one of the runs has."""
        found = {}
        for name in dict.fromkeys(name for run in self.runs for name in run.ends):
            having = [run for run in self.runs if run.ends.get(name)]
            if not having:
                continue
            values = [fmean(run.ends[name]) for run in having]
            starts = [run.starts[name] for run in having if name in run.starts]
            found[name] = Figure(
                start=fmean(starts) if starts else None,
                end=fmean(values),
                half_width=half_width(values if len(self.runs) > 1 else having[0].ends[name]),
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several runs, repeats put together."""

    arms: tuple[Arm, ...]
    options: Mapping[str, Sequence[object]]
    """Dotted names of the options in which arms differ, and the value in each arm."""
    left_out: Mapping[str, str]
    """Run directory -> why it could not be read."""

    @property
    def last_steps(self) -> set[int]:
        return {run.last_step for arm in self.arms for run in arm.runs}


def compare_runs(
    paths: Sequence[Path], *, last: int = LAST, until: int | None = None
) -> Comparison:
    """Read the runs and group repeats; `until` ignores all steps after that one."""
    runs, left_out = [], {}
    for path in dict.fromkeys(paths):
        try:
            runs.append(read_ends(path, last=last, until=until))
        except (MooredError, OSError) as error:
            left_out[str(path)] = str(error)
    if not runs:
        raise MooredError("; ".join(left_out.values()))
    arms = [
        Arm(label=_letter(index), runs=tuple(members))
        for index, members in enumerate(_repeats(runs))
    ]
    return Comparison(arms=tuple(arms), options=_differences(arms), left_out=left_out)


def read_ends(path: Path, *, last: int = LAST, until: int | None = None) -> RunEnds:
    """Start and end of one run."""
    steps, looks = read_records(path), read_records(path, "collapse")
    if until is not None:
        steps, looks = ([r for r in kind if _step(r) <= until] for kind in (steps, looks))
    if not steps:
        within = "" if until is None else f" up to step {until}"
        raise MooredError(f"{str(path)!r} has no finished step{within}; nothing to compare")
    # Start and end of a short run must not overlap: a single step is its end.
    num = max(1, min(last, len(steps) // 2))
    first = steps[:num] if len(steps) > 1 else []
    early = [look for look in looks if first and _step(look) <= _step(first[-1])]
    late = [look for look in looks if _step(look) >= _step(steps[-num])] or looks[-1:]
    starts = _step_values(first) | look_values(early)
    ends = _step_values(steps[-num:]) | look_values(late)
    alarms = [_step(look) for look in looks if look.get("alarm")]
    verdict = looks[-1].get("verdict") if looks else None
    return RunEnds(
        path=path,
        last_step=_step(steps[-1]),
        num_averaged=num,
        starts={name: fmean(values) for name, values in starts.items()},
        ends=ends,
        verdict=None if verdict is None else str(verdict).replace("_", " "),
        alarm_step=alarms[0] if alarms else None,
        num_lost=sum(map(lost_episodes, steps)),
        options=read_options(path),
    )


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean, by Student's t; None for one value."""
    if len(values) < 2:
        return None
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    return quantile * stdev(values) / math.sqrt(len(values))


def _step_values(steps: Sequence[Record]) -> dict[str, list[float]]:
    found = {name: _numbers(steps, key) for name, key in STEP_FIGURES.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def look_values(looks: Sequence[Any]) -> dict[str, list[float]]:
    """The figures of each environment; its name is left out where there is only one."""
    found: dict[str, list[float]] = {}
    envs = dict.fromkeys(env for look in looks for env in look.get("environments", ()))
    for env in envs:
        followed = [_followed(look, env) for look in looks if env in look["environments"]]
        suffix = f", {env}" if len(envs) > 1 else ""
        for name, key in LOOK_FIGURES.items():
            found[f"{name}{suffix}"] = _numbers(followed, key)
    return {name: numbers for name, numbers in found.items() if numbers}


def _followed(look: Any, env: str) -> Record:
    """The report that the verdict on an environment rests on; empty if it was not measured."""
    return look["reports"].get(look["environments"][env]["view"], {})


def _numbers(records: Sequence[Record], key: str) -> list[float]:
    """The numbers under a key; null and missing ones are left out."""
    values = (record.get(key) for record in records)
    return [float(value) for value in values if isinstance(value, int | float)]


def read_options(path: Path) -> dict[str, object]:
    """Every option of a run by its dotted name; empty without a readable config.yaml.

    One that was changed when the run was resumed also has its earlier values, or the run would
    pass for one that had the last value throughout.
    """
    try:
        found = dict(_flatten(read_yaml(path / "config.yaml")))
        return found | {f"{c.name}, until step {c.step}": c.old for c in read_changes(path)}
    except MooredError:
        return {}  # its numbers can still be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option that was changed when a run was resumed after a step."""

    step: int
    name: str
    old: object
    new: object


def read_changes(path: Path) -> list[OptionChange]:
    """What was changed in the middle of a run, as far as steps depend on it; oldest first."""
    records = cast("list[dict[str, Any]]", read_records(path, "changes"))
    return [
        OptionChange(step=record["step"], name=name, old=change["old"], new=change["new"])
        for record in records
        for name, change in record["options"].items()
        if name.partition(".")[0] not in CHANGED_FREELY
    ]


def _flatten(value: object, name: str = "") -> list[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        parts = ((f"{name}.{key}" if name else str(key), item) for key, item in value.items())
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        parts = ((f"{name}.{index}", item) for index, item in enumerate(value))
    else:
        return [(name, value)]
    return [pair for key, item in parts for pair in _flatten(item, key)]


def _repeats(runs: Sequence[RunEnds]) -> list[list[RunEnds]]:
    """Runs with equal options and different seeds together; others alone."""
    groups: list[list[RunEnds]] = []
    for run in runs:
        for group in groups:
            seeds = [other.options.get("seed") for other in group]
            compared = [compared_options(each.options) for each in (run, group[0])]
            alike = bool(run.options) and compared[0] == compared[1]
            if alike and run.options.get("seed") not in seeds:
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def compared_options(options: Mapping[str, object]) -> dict[str, object]:
    """Those that are equal in repeats of a run."""
    return {
        key: value for key, value in options.items() if key.partition(".")[0] not in NOT_COMPARED
    }


def _differences(arms: Sequence[Arm]) -> dict[str, list[object]]:
    """Options whose values differ between arms; the seed too, where no arm has several."""
    firsts = [arm.runs[0].options for arm in arms]
    names = dict.fromkeys(name for options in firsts for name in options)
    repeated = any(len(arm.runs) > 1 for arm in arms)
    found = {}
    for name in names:
        values = [options.get(name, ABSENT) for options in firsts]
        if any(value != values[0] for value in values) and not (name == "seed" and repeated):
            found[name] = values
    return found


def _step(record: Record) -> int:
    step = record["step"]
    assert isinstance(step, int)
    return step


def _letter(index: int) -> str:
    """A, B, … Z, A1, B1, …"""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def figure_cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    start = "" if figure.start is None else f"{_decimals(figure.start)} → "
    spread = "" if figure.half_width is None else f" ± {figure.half_width:.3f}"
    return f"{start}{_decimals(figure.end)}{spread}"


def _decimals(value: float) -> str:
    """Three decimals, without a minus sign before zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def verdicts_of(arm: Arm) -> str:
    """The verdict of one run, or how many runs have which."""
    words = [run.verdict or "–" for run in arm.runs]
    if len(set(words)) == 1:
        return words[0]
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def alarms_of(arm: Arm) -> str:
    steps = ["–" if run.alarm_step is None else str(run.alarm_step) for run in arm.runs]
    return ", ".join(steps) if set(steps) != {"–"} else "–"


def explanation(found: Comparison) -> list[str]:
    """What is averaged, and what the intervals are over."""
    averaged = sorted({run.num_averaged for arm in found.arms for run in arm.runs})
    num = str(averaged[0]) if len(averaged) == 1 else f"{averaged[0]} to {averaged[-1]}"
    steps = "step" if averaged == [1] else f"{num} steps"
    lines = [f"Means over the first and the last {steps} of each run, and the looks in them."]
    over = {arm.interval_over for arm in found.arms if _has_interval(arm)}
    if "seeds" in over:
        lines.append("± is half of the 95 % interval over seeds.")
    if "steps" in over:
        which = " of the other runs" if "seeds" in over else ""
        lines.append(
            f"± is half of the 95 % interval over steps{which}. Steps of one run are not "
            f"independent, so it is too narrow; repeat with other seeds for one that is not."
        )
    ends = found.last_steps
    if len(ends) > 1:
        lines.append(
            f"The runs end at different steps, from {min(ends)} to {max(ends)}; --until "
            f"{min(ends)} compares all of them there."
        )
    lost = {arm.label: sum(run.num_lost for run in arm.runs) for arm in found.arms}
    if any(lost.values()):
        each = ", ".join(f"{label} {num}" for label, num in lost.items())
        lines.append(
            f"Episodes that ended in an error, and count in neither success nor reward: {each}."
        )
    return lines


def lost_sentence(steps: Sequence[Record]) -> str | None:
    """How many episodes of a run ended in an error, and how often; None where none did."""
    lost = [num for num in map(lost_episodes, steps) if num]
    if not lost:
        return None
    episodes = "1 episode" if sum(lost) == 1 else f"{sum(lost):,} episodes"
    return (
        f"{episodes} ended in an error, in {len(lost)} of {len(steps)} steps, and no success or "
        f"reward is of such an episode."
    )


def option_cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_interval(arm: Arm) -> bool:
    return any(figure.half_width is not None for figure in arm.figures().values())


@dataclass(frozen=True, slots=True)
class TaskReplies:
    """One task at one step: what the model saw, and the first reply of every run."""

    step: int
    seen: str
    replies: tuple[str, ...]


def shared_replies(runs: Sequence[Path], *, num_tasks: int = 2) -> list[TaskReplies]:
    """Replies to tasks that all runs met, at the first, the middle and the last stored step.

    Runs with the same seed and environments meet the same tasks at the same steps.
    """
    files = [_files_by_step(run) for run in runs]
    steps = sorted(set.intersection(*(set(of_run) for of_run in files)))
    if not steps:
        raise MooredError(
            f"{len(runs)} runs have no step whose rollouts are stored in all of them; set the same "
            f"log.rollouts_every (10 by default)"
        )
    found: list[TaskReplies] = []
    for step in dict.fromkeys([steps[0], steps[len(steps) // 2], steps[-1]]):
        groups = [_by_task(read_groups(of_run[step])) for of_run in files]
        found += _replies_of_step(step, groups, num_tasks)
    if not found:
        raise MooredError("the runs met no task in common; give runs with the same seed")
    return found


def _replies_of_step(
    step: int, groups: Sequence[Mapping[tuple[str, int], Group]], num_tasks: int
) -> list[TaskReplies]:
    shared = [task for task in groups[0] if all(task in others for others in groups)]
    turns = [
        [of_run[task].trajectories[0].turns[0] for of_run in groups] for task in shared[:num_tasks]
    ]
    seen = _differing_lines([content_text(of_task[0].seen) for of_task in turns])
    return [
        TaskReplies(step, text, tuple(turn.reply for turn in of_task))
        for text, of_task in zip(seen, turns, strict=True)
    ]


def _files_by_step(run: Path) -> dict[int, Path]:
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    return {int(file.stem.removeprefix("step_")): file for file in files}


def _by_task(groups: Sequence[Group]) -> dict[tuple[str, int], Group]:
    """Groups whose first episode has a turn, by environment and task."""
    return {
        (group.env, group.task_seed): group
        for group in groups
        if group.trajectories and group.trajectories[0].turns
    }


def _differing_lines(texts: Sequence[str]) -> list[str]:
    """Texts from where they differ, without the lines in which all of them end."""
    lines = [text.split("\n") for text in differing_parts(texts)]
    if len(texts) > 1:
        while all(lines) and len({of_text[-1] for of_text in lines}) == 1:
            lines = [of_text[:-1] for of_text in lines]
    return ["\n".join(of_text) for of_text in lines]
