"""The table of a study: means with 95 % intervals over seeds, one row per combination of arms.

Reads run directories only. Figures are means over the last steps of a run, as in `moored compare`;
times and tokens are means over all steps except the first, which sets things up. Differences are
taken seed by seed, because runs of one seed see the same tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from moored.analysis.compare import LAST, LOOK_FIGURES, half_width, look_values, read_ends
from moored.diagnostics.resampling import wilson_interval
from moored.errors import MooredError
from moored.runlog.log import read_records

PHASES = ("rollout", "filter", "collapse", "advantages", "update", "publish", "evaluation", "log")
END_FIGURES = (
    *("success", "reward", "well-formed replies", "validation success"),
    *("MI", "H(Z|X)", "retrieval"),
)
"""Those of `moored compare`, at the end of the run; the last three in the followed view, and in a
run of several environments for each of them: `MI, sokoban`."""
STEP_MEANS = {
    "kept groups": "filter/kept_fraction",
    "reply tokens": "rollout/reply_tokens_mean",
    "reward variance": "rollout/reward_variance_mean",
    "Std/Mean of RV": "rollout/reward_variance_std_over_mean",
    "tokens generated": "tokens/generated",
    "tokens trained": "tokens/trained",
}
"""Means over all steps except the first."""
FIRST_MEANS = {"outcome-free share": "signal/outcome_free_share"}
"""Means over the first `LAST` steps, in which most runs that collapse begin to."""
TIMES = ("seconds a step", *(f"seconds: {phase}" for phase in PHASES), "filter, % of a step")
FIGURES = (*END_FIGURES, "peak success", *STEP_MEANS, *FIRST_MEANS, *TIMES)
DEFAULT_FIGURES = ("success", "reward", "MI", "H(Z|X)", "retrieval", "seconds a step")
LAST_LOOKS, COLLAPSED = 4, 1 / 3
"""A run has collapsed when MI over its last looks is on average below this share of its highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one finished or unfinished run gives."""

    path: Path
    seed: int
    last_step: int
    num_averaged: int
    """Steps at the end that the figures of the end are means over."""
    figures: Mapping[str, float]
    verdict: str | None
    """Of the last look."""
    alarm_step: int | None
    has_collapsed: bool | None
    """In any of its environments; None when MI was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Of one figure over seeds."""

    mean: float
    half_width: float | None
    """Of the 95 % interval; None with one seed."""
    by_seed: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination of arms."""

    arms: tuple[str, ...]
    runs: tuple[RunResult, ...]
    figures: Mapping[str, Mean]
    differences: Mapping[str, Mean]
    """From the row it is compared with, seed by seed; empty when there is none."""

    @property
    def verdicts(self) -> dict[str, int]:
        return dict(Counter(run.verdict or "not measured" for run in self.runs))

    @property
    def alarm_steps(self) -> list[int | None]:
        return [run.alarm_step for run in self.runs]

    @property
    def collapsed(self) -> list[bool]:
        """Of the runs in which MI was measured."""
        return [run.has_collapsed for run in self.runs if run.has_collapsed is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTable:
    """All rows, in the order of the grid."""

    factors: tuple[str, ...]
    figures: tuple[str, ...]
    rows: tuple[Row, ...]
    against: tuple[str, str] | None
    left_out: Mapping[str, str]
    """Run directory -> why it is not in the table."""


def read_table(
    runs: Mapping[tuple[str, ...], Mapping[int, Path]],
    *,
    factors: Sequence[str],
    figures: Sequence[str] = DEFAULT_FIGURES,
    against: tuple[str, str] | None = None,
) -> StudyTable:
    """Read the run directories, given by arms and seed; those without a step are left out."""
    results: dict[tuple[str, ...], list[RunResult]] = {}
    left_out = {}
    for arms, by_seed in runs.items():
        results[arms] = []
        for seed, path in by_seed.items():
            try:
                results[arms].append(read_result(path, seed))
            except (MooredError, OSError) as error:
                left_out[str(path)] = str(error)
    figures = _with_environments(figures, [run for found in results.values() for run in found])
    means = {arms: _means(found, figures) for arms, found in results.items()}
    rows = [
        Row(
            arms=arms,
            runs=tuple(found),
            figures=means[arms],
            differences=_differences(arms, means, factors, against),
        )
        for arms, found in results.items()
    ]
    return StudyTable(
        factors=tuple(factors),
        figures=tuple(figures),
        rows=tuple(rows),
        against=against,
        left_out=left_out,
    )


def read_result(path: Path, seed: int) -> RunResult:
    """All figures of one run; missing ones are left out."""
    ends = read_ends(path)
    steps, timing = read_records(path), read_records(path, "timing")
    figures = {name: fmean(values) for name, values in ends.ends.items() if values}
    if success := _numbers(steps, "rollout/success_rate"):
        figures["peak success"] = peak(success)
    parts = [(_settled(steps), STEP_MEANS), (steps[:LAST], FIRST_MEANS)]
    for part, keys in parts:
        found = {name: _numbers(part, key) for name, key in keys.items()}
        figures |= {name: fmean(values) for name, values in found.items() if values}
    mi = [
        values
        for name, values in look_values(read_records(path, "collapse")).items()
        if name.partition(",")[0] == "MI"
    ]
    return RunResult(
        path=path,
        seed=seed,
        last_step=ends.last_step,
        num_averaged=ends.num_averaged,
        figures=figures | _times(_settled(timing)),
        verdict=ends.verdict,
        alarm_step=ends.alarm_step,
        has_collapsed=any(map(has_collapsed, mi)) if mi else None,
    )


def has_collapsed(mi: Sequence[float]) -> bool:
    """Whether MI, given look by look, was lost by the end of a run."""
    return fmean(mi[-LAST_LOOKS:]) < COLLAPSED * max(mi)


def peak(values: Sequence[float], window: int = LAST) -> float:
    """The highest mean over `window` steps in a row, or over all if there are fewer."""
    num = min(window, len(values))
    return max(fmean(values[i : i + num]) for i in range(len(values) - num + 1))


def _settled(records: Sequence[Any]) -> Sequence[Any]:
    return records[1:] or records


def _times(timing: Sequence[Any]) -> dict[str, float]:
    """Seconds a step, in all and by phase; a phase that not every step has counts as 0 there."""
    if not timing:
        return {}
    found = {
        f"seconds: {phase}": fmean(_number(record, f"{phase}_s") or 0.0 for record in timing)
        for phase in PHASES
    }
    step_s = sum(found.values())
    share = {"filter, % of a step": 100.0 * found["seconds: filter"] / step_s} if step_s else {}
    return {"seconds a step": step_s, **found, **share}


def _number(record: Mapping[str, object], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else None


def _numbers(records: Sequence[Any], key: str) -> list[float]:
    """The numbers under a key; null, e.g. where all episodes of a step ended in errors, is none."""
    return [value for record in records if (value := _number(record, key)) is not None]


def _means(runs: Sequence[RunResult], figures: Sequence[str]) -> dict[str, Mean]:
    found = {}
    for name in figures:
        by_seed = {run.seed: run.figures[name] for run in runs if name in run.figures}
        if by_seed:
            found[name] = _mean(by_seed)
    return found


def _with_environments(figures: Sequence[str], runs: Sequence[RunResult]) -> list[str]:
    """The figures, and after one of looks those of each environment, where runs have several."""
    known = dict.fromkeys(name for run in runs for name in run.figures)
    found: list[str] = []
    for figure in figures:
        own = [name for name in known if name.startswith(f"{figure}, ")]
        found += [figure, *(own if figure in LOOK_FIGURES else [])]
    return found


def _mean(by_seed: Mapping[int, float]) -> Mean:
    values = list(by_seed.values())
    return Mean(mean=fmean(values), half_width=half_width(values), by_seed=dict(by_seed))


def _differences(
    arms: tuple[str, ...],
    means: Mapping[tuple[str, ...], Mapping[str, Mean]],
    factors: Sequence[str],
    against: tuple[str, str] | None,
) -> dict[str, Mean]:
    """Figures less those of the row with the arm to compare with, over the seeds both have."""
    if against is None:
        return {}
    position = list(factors).index(against[0])
    other = (*arms[:position], against[1], *arms[position + 1 :])
    if other == arms or other not in means:
        return {}
    found = {}
    for name, mean in means[arms].items():
        base = means[other].get(name)
        shared = mean.by_seed.keys() & base.by_seed.keys() if base else set()
        if base and shared:
            found[name] = _mean({s: mean.by_seed[s] - base.by_seed[s] for s in sorted(shared)})
    return found


def table_lines(table: StudyTable, *, differences: bool = False) -> list[list[str]]:
    """Header and rows as text, for the terminal and for Markdown."""
    figures = [name for name in table.figures if any(name in row.figures for row in table.rows)]
    header = [*table.factors, *figures]
    if differences:
        rows = [row for row in table.rows if row.differences]
        cells = [
            [*row.arms, *(_cell(row.differences.get(n), "+") for n in figures)] for row in rows
        ]
        return [header, *cells]
    lines = [[*header, "collapsed", "verdict", "alarms", "runs"]]
    for row in table.rows:
        alarms = sum(step is not None for step in row.alarm_steps)
        lines.append(
            [
                *row.arms,
                *(_cell(row.figures.get(name)) for name in figures),
                _share(row.collapsed),
                ", ".join(f"{count} {word}" for word, count in row.verdicts.items()) or "–",
                f"{alarms} of {len(row.runs)}",
                str(len(row.runs)),
            ]
        )
    return lines


def _cell(mean: Mean | None, sign: str = "") -> str:
    if mean is None:
        return "–"
    digits = 0 if abs(mean.mean) >= 100 else 3
    spread = "" if mean.half_width is None else f" ± {mean.half_width:.{digits}f}"
    return f"{mean.mean:{sign}.{digits}f}{spread}"


def _share(found: Sequence[bool]) -> str:
    """`2 of 10 [0.06, 0.51]`, the interval that of Wilson."""
    if not found:
        return "–"
    low, high = wilson_interval(sum(found), len(found))
    return f"{sum(found)} of {len(found)} [{low:.2f}, {high:.2f}]"


def table_notes(table: StudyTable) -> list[str]:
    """What the means are over, and what makes runs differ that should be alike."""
    runs = [run for row in table.rows for run in row.runs]
    if not runs:
        return []
    averaged, ends = ({run.num_averaged for run in runs}, {run.last_step for run in runs})
    steps = "step" if averaged == {1} else f"{_span(averaged)} steps"
    found = [
        "Means over seeds; ± is half of the 95 % interval (Student's t). Success, reward and "
        f"collapse are means over the last {steps} of each run."
    ]
    if any(row.collapsed for row in table.rows):
        found.append(
            f"Collapsed: MI of the last {LAST_LOOKS} looks is on average below a third of its "
            f"highest; brackets are 95 % Wilson intervals."
        )
    if len(ends) > 1:
        found.append(f"The runs end at different steps, from {min(ends)} to {max(ends)}.")
    return found


def _span(values: set[int]) -> str:
    return str(min(values)) if len(values) == 1 else f"{min(values)} to {max(values)}"


def to_markdown(table: StudyTable) -> str:
    """The table, the differences below it, and what its figures are."""
    text = markdown_table(table_lines(table))
    if table.against is not None and any(row.differences for row in table.rows):
        text += f"\nDifferences from {table.against[0]} {table.against[1]}, seed by seed:\n\n"
        text += markdown_table(table_lines(table, differences=True))
    return "\n".join([text, *(f"{note}\n" for note in table_notes(table))])


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A header and rows of cells."""
    header, *rows = lines
    table = [header, ["---"] * len(header), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in table]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def to_dict(table: StudyTable) -> dict[str, object]:
    """Everything in the table, for scripts."""
    return {
        "factors": list(table.factors),
        "rows": [
            {
                "arms": dict(zip(table.factors, row.arms, strict=True)),
                "runs": [
                    {
                        "path": str(run.path),
                        "seed": run.seed,
                        "last_step": run.last_step,
                        "verdict": run.verdict,
                        "alarm_step": run.alarm_step,
                        "has_collapsed": run.has_collapsed,
                        "figures": dict(run.figures),
                    }
                    for run in row.runs
                ],
                "figures": {name: _as_dict(mean) for name, mean in row.figures.items()},
                "differences": {name: _as_dict(mean) for name, mean in row.differences.items()},
            }
            for row in table.rows
        ],
        "against": list(table.against) if table.against else None,
        "left_out": dict(table.left_out),
    }


def _as_dict(mean: Mean) -> dict[str, object]:
    return {"mean": mean.mean, "half_width": mean.half_width, "by_seed": dict(mean.by_seed)}
