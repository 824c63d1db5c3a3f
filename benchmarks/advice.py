"""What the rule of `moored advise` says of the stored studies, against what the filter did there.

    python benchmarks/advice.py

Of every stored study with an arm `none` and an arm `top_p`: success, Std/Mean of RV and, where the
runs logged it, the outcome-free share over the first ten steps without a filter (means over steps
and seeds with 95 % intervals), the advice by them, and what the filter changed at the end, seed by
seed. PPO's share is of other advantages than the rule is about, and does not count in it. Then, run
by run, how well the figures tell the runs that collapse: the area under the curve (AUC), 0.5 for
chance. Prints Markdown and writes `--out`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from curves import interval, up_to_shortest

from moored import __version__
from moored.algo.snr import FIRST_STEPS, FREE_ABOVE, HELPS_ABOVE, Figure, recommend
from moored.analysis.curves import StoredRun, read_curve_file
from moored.analysis.study_table import has_collapsed
from moored.errors import ConfigError

RESULTS = Path(__file__).parent / "results"
SUCCESS, RATIO, SHARE = "success", "Std/Mean of RV", "outcome-free share"
LAST_STEPS, LAST_LOOKS = 10, 4
NONE, FILTER = "none", "top_p"
Runs = Mapping[str, Sequence[StoredRun]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and half of its 95 % interval; None where one value has none."""

    value: float
    half: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One setting: its first steps without a filter, the advice, and what the filter did."""

    name: str
    seeds: Sequence[int]
    success: Mean
    ratio: Mean
    share: Mean | None
    advice: str
    collapsed: Mapping[str, int]
    """By arm, of as many runs as there are seeds."""
    success_gain: Mean
    mi_gain: Mean


def mean_of(values: Sequence[float]) -> Mean:
    centre, half = interval(values)
    return Mean(value=round(centre, 6), half=None if math.isnan(half) else round(half, 6))


def first_steps(run: StoredRun, name: str) -> list[float]:
    return [value for step, value in run.curves.get(name, ()) if step <= FIRST_STEPS]


def last_looks(run: StoredRun) -> float:
    return fmean([value for _, value in run.followed("MI")][-LAST_LOOKS:])


def end_of(run: StoredRun) -> float:
    return fmean([value for _, value in run.curves[SUCCESS]][-LAST_STEPS:])


def collapses(run: StoredRun) -> bool:
    return has_collapsed([value for _, value in run.followed("MI")])


def as_figure(mean: Mean, bar: float) -> Figure:
    half = math.inf if mean.half is None else mean.half
    return Figure(mean.value, mean.value - half, mean.value + half, bar)


def study_of(name: str, without: Sequence[StoredRun], filtered: Sequence[StoredRun]) -> Study:
    pairs = paired(without, filtered)
    members = [run for run, _ in pairs]
    found = {
        key: [value for run in members for value in first_steps(run, key)]
        for key in (SUCCESS, RATIO, SHARE)
    }
    ratio = mean_of(found[RATIO])
    share = mean_of(found[SHARE]) if found[SHARE] else None
    counts = share is not None and "ppo" not in name
    advice = recommend(
        as_figure(ratio, HELPS_ABOVE), as_figure(share, FREE_ABOVE) if share and counts else None
    )
    return Study(
        name=name,
        seeds=[run.seed for run in members],
        success=mean_of(found[SUCCESS]),
        ratio=ratio,
        share=share,
        advice=advice.value,
        collapsed={
            NONE: sum(collapses(run) for run, _ in pairs),
            FILTER: sum(collapses(run) for _, run in pairs),
        },
        success_gain=mean_of([end_of(b) - end_of(a) for a, b in pairs]),
        mi_gain=mean_of([last_looks(b) - last_looks(a) for a, b in pairs]),
    )


def paired(
    without: Sequence[StoredRun], filtered: Sequence[StoredRun]
) -> list[tuple[StoredRun, StoredRun]]:
    """By seed."""
    of_seed = {run.seed: run for run in filtered}
    return [(run, of_seed[run.seed]) for run in without if run.seed in of_seed]


def arms_of(runs: Runs) -> Iterator[tuple[str, str]]:
    """An arm without a filter and the same with top-p; the filter is the last factor of a name."""
    for arm in runs:
        before, sep, rule = arm.rpartition("/")
        if rule == NONE and f"{before}{sep}{FILTER}" in runs:
            yield arm, f"{before}{sep}{FILTER}"


def read_all(files: Sequence[Path]) -> tuple[dict[str, tuple[Runs, str, str]], dict[str, str]]:
    """Settings by name, with their file's runs and both arms; and what was left out, and why."""
    found: dict[str, tuple[Runs, str, str]] = {}
    left_out, seen = {}, {}
    for file in files:
        try:
            runs = up_to_shortest(read_curve_file(file))
        except ConfigError:
            continue  # Another kind of result.
        for none, top_p in arms_of(runs):
            before = none.rpartition("/")[0]
            name = f"{file.stem}, {before}" if before else file.stem
            key = str([run.curves[SUCCESS] for run in (*runs[none], *runs[top_p])])
            if not all(run.curves.get(RATIO) for run in runs[none]):
                left_out[name] = f"its curves have no {RATIO}"
            elif not paired(runs[none], runs[top_p]):
                left_out[name] = "its arms share no seed"
            elif key in seen:
                left_out[name] = f"the same runs as {seen[key]}"
            else:
                seen[key], found[name] = name, (runs, none, top_p)
    return found, left_out


def auc(figures: Sequence[float], is_hit: Sequence[bool]) -> float | None:
    """Chance that a run that collapses has the larger figure; ties count half."""
    hits = np.array([f for f, hit in zip(figures, is_hit, strict=True) if hit])
    others = np.array([f for f, hit in zip(figures, is_hit, strict=True) if not hit])
    if not len(hits) or not len(others):
        return None
    gap = hits[:, None] - others
    return float(np.mean((gap > 0) + 0.5 * (gap == 0)))


def tell_collapse(runs: Sequence[StoredRun], names: Sequence[str]) -> dict[str, object]:
    """AUC of each figure over the runs that have all of them."""
    members = [run for run in runs if all(first_steps(run, name) for name in names)]
    hits = [collapses(run) for run in members]
    figures = {name: [fmean(first_steps(run, name)) for run in members] for name in names}
    return {
        "num_runs": len(members),
        "num_collapsed": sum(hits),
        "auc": {name: auc(values, hits) for name, values in figures.items()},
    }


def outcome_of(study: Study) -> str:
    """Whether the filter changed success, by the interval over seeds."""
    gain = study.success_gain
    if gain.half is None or abs(gain.value) <= gain.half:
        return "no difference"
    return "gain" if gain.value > 0.0 else "loss"


def shown(mean: Mean | None, sign: str = "") -> str:
    if mean is None:
        return "–"
    half = "" if mean.half is None else f" ± {mean.half:.2f}"
    return f"{mean.value:{sign}.2f}{half}".replace("-", "−")


def row_of(study: Study) -> str:
    cells = [
        study.name,
        shown(study.success),
        shown(study.ratio),
        shown(study.share),
        study.advice.replace("_", " "),
        f"{study.collapsed[NONE]}, {study.collapsed[FILTER]} of {len(study.seeds)}",
        shown(study.success_gain, "+"),
        shown(study.mi_gain, "+"),
    ]
    return f"| {' | '.join(cells)} |"


def collapse_row(kind: str, found: Mapping[str, object]) -> str:
    areas = found["auc"]
    assert isinstance(areas, dict)
    known = [areas.get(name) for name in (SHARE, RATIO, SUCCESS)]
    cells = ["–" if area is None else f"{area:.2f}" for area in known]
    return f"| {kind} | {found['num_collapsed']} of {found['num_runs']} | {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The rule of advise against the stored studies.")
    parser.add_argument("files", nargs="*", type=Path, help="default: all stored curve files")
    parser.add_argument("--out", type=Path, default=RESULTS / "advice.json")
    given = parser.parse_args(words)
    files = given.files or sorted(file for file in RESULTS.glob("*.json") if file != given.out)
    settings, left_out = read_all(files)
    studies = [study_of(name, runs[a], runs[b]) for name, (runs, a, b) in settings.items()]
    everything = [run for runs, none, _ in settings.values() for run in runs[none]]
    told = {
        "all": tell_collapse(everything, (RATIO, SUCCESS)),
        "those that logged the share": tell_collapse(everything, (SHARE, RATIO, SUCCESS)),
    }
    came = {
        advice: [outcome_of(study) for study in studies if study.advice == advice]
        for advice in dict.fromkeys(study.advice for study in studies)
    }
    print("| study | success | Std/Mean of RV | share | advice | collapsed | success | MI |")
    print("|---|---|---|---|---|---|---|---|")
    print(*map(row_of, studies), sep="\n")
    print("\n| advice | studies | gain in success | no difference | loss |\n|---|---|---|---|---|")
    for advice, found in came.items():
        counts = (str(found.count(which)) for which in ("gain", "no difference", "loss"))
        print(f"| {advice.replace('_', ' ')} | {len(found)} | {' | '.join(counts)} |")
    print("\nleft out:", *(f"{name}: {why}" for name, why in left_out.items()), sep="\n  ")
    header = "| runs without a filter | collapsed | AUC of share | of Std/Mean of RV | of success |"
    print(f"\n{header}\n|---|---|---|---|---|")
    print(*(collapse_row(kind, found) for kind, found in told.items()), sep="\n")
    record = {
        "command": "python benchmarks/advice.py",
        "versions": {"moored": __version__, "numpy": np.__version__}
        | {"python": platform.python_version()},
        "files": sorted({name.partition(", ")[0] for name in settings}),
        "studies": [asdict(study) for study in studies],
        "outcomes": came,
        "left_out": left_out,
        "tells_collapse": told,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
