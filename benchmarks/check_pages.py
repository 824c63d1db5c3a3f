"""Do pages, figures and stored results agree? `make docs-check` prints what does not.

PAGES: how the rows and counts of a page are computed from which files of `benchmarks/results`.
Every picture is drawn again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import advice
import alarm
import curves
import figure
from curves import up_to_shortest

from moored.analysis.compare import half_width
from moored.analysis.correlate import correlate
from moored.analysis.curves import read_all, read_curve_file
from moored.diagnostics.resampling import wilson_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("", "_sokoban", "_frozen_lake")


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def files(*patterns: str) -> list[Path]:
    return [file for pattern in patterns for file in sorted(RESULTS.glob(f"{pattern}.json"))]


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().replace("−", "-").split())


def row(*cells: object) -> str:
    return f" {' | '.join(map(str, cells))} |"


def alarm_rows() -> Iterator[str]:
    outcomes = [alarm.Outcome(**run) for run in stored("alarm")["runs"]]
    yield row(*alarm.summarise("all", outcomes)[:5])
    for study in {run.study for run in outcomes if run.collapsed}:
        name, *cells = alarm.summarise(study, [run for run in outcomes if run.study == study])
        yield row(f"`{name}`", *cells[:2])


def division_rows() -> Iterator[str]:
    for name in ("bottle", "bottle_gate", "bottle_ppo", "bottle_mini"):
        for arm in stored(f"study_{name}")["rows"]:
            lost = [run["has_collapsed"] for run in arm["runs"]]
            low, high = wilson_interval(sum(lost), len(lost))
            shown = [arm["figures"][key] for key in ("success", "MI", "outcome-free share")]
            means = (f"{each['mean']:.3f} ± {each['half_width']:.3f}" for each in shown)
            yield row(f"{sum(lost)} of {len(lost)} [{low:.2f}, {high:.2f}]", *means)


def bottle_rows() -> Iterator[str]:
    for name, mi in (("cpu", "MI"), ("ppo_sokoban", "MI, swap"), ("grpo_sokoban", "MI, swap")):
        lines = curves.table_of(read_curve_file(RESULTS / f"bottle_{name}_task.json"))
        yield from (row(*cells) for curve, *cells in lines if curve in (mi, "success"))


def growth_counts() -> Iterator[str]:
    smollm2 = (f"smollm2_*_{end}" for end in ("grpo", "ppo", "first", "pair", "long"))
    every = files("bottle_*", "curves_*", "sokoban_mini", *smollm2, "smollm2_division")
    every += files("division_*")
    shown = ("none", "top_p", "outcome", "lowest_half")
    for kind, arms in (("reply tokens", shown), ("kept", ("top_p",))):
        lines = curves.growth_lines(every, kind)
        yield from (f"{lost} and {held}" for arm, lost, held in lines if arm in arms)


def correlation_cells() -> Iterator[str]:
    pool, *tasks = (
        {each["name"]: each for each in stored(f"correlation{part}")["correlations"]}
        for part in PARTS
    )
    cells = [pool["MI"]["by_lag"][lag] for lag in ("-20", "-10", "0", "10", "20")]
    for name in pool.keys() - {"reward", "validity"}:
        cells += [each[name]["spearman"] for each in (pool, *tasks)] + [pool[name]["between_seeds"]]
    yield from (f"{x['value']:+.2f} [{x['low']:+.2f}, {x['high']:+.2f}]" for x in cells)


def smollm2_rows() -> Iterator[str]:
    runs = read_curve_file(RESULTS / "smollm2_division.json")
    lines = [line for line in curves.lines_of_runs(runs) if line[1] == "mean"]
    for one, other in (("grpo/top_p", "grpo/none"), ("no_division/none", "grpo/none")):
        lines.append(curves.paired_line(runs, one, other))
    runs = read_curve_file(RESULTS / "smollm2_engines.json")
    lines += [curves.paired_line(runs, one, "plain") for one in ("moored", "lora")]
    yield from (row(line[2], *line[4:6]) for line in lines)
    for task in ("sokoban", "frozen_lake", "countdown", "metamath", "gsm8k"):
        for file in files(f"smollm2_{task}_ppo", f"smollm2_{task}_grpo")[: 1 + (task[0] != "s")]:
            means = {x[0]: x for x in curves.lines_of_runs(read_curve_file(file)) if x[1] == "mean"}
            ends = [means[arm][place] for place in (2, 4) for arm in ("none", "top_p")]
            yield row(*ends, curves.paired_line(read_curve_file(file), "top_p", "none")[2])


def advice_rows() -> Iterator[str]:
    for name, found in stored("advice")["outcomes"].items():
        counts = map(found.count, ("gain", "no difference", "loss"))
        yield row(name.replace("_", " "), len(found), *counts)


PAGES = {
    "docs/results/alarm.md": [alarm_rows],
    "docs/results/collapse.md": [division_rows, bottle_rows, growth_counts],
    "docs/results/correlation.md": [correlation_cells],
    "docs/results/smollm2.md": [smollm2_rows],
    "docs/filtering.md": [advice_rows],
}


def missing_on_pages() -> Iterator[str]:
    for page, checks in PAGES.items():
        text = text_of(page)
        for wanted in (wanted for check in checks for wanted in check()):
            if wanted.replace("−", "-") not in text:
                yield f"{page} does not have {wanted!r}"
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## What it found") : readme.index("## Where things are")]
    for finding in section.split("\n- ")[1:]:
        (page,) = re.findall(r"\]\(([^)]+)\)", finding)
        for number in re.findall(r"\d+ of \d+|\d+\.\d+", finding):
            if number not in text_of(page):
                yield f"README.md says {number}, {page} does not"


def intervals_of_studies() -> Iterator[str]:
    """Every interval of a section is that of an arm, or of a difference, in the section's files."""
    for section in text_of("docs/results/studies.md").split(" ## ")[1:]:
        known = set()
        for name in re.findall(r"benchmarks/results/(study_\w+)\.json", section):
            for mean, half in intervals(stored(name)["rows"]):
                known |= {f"{mean:.{digits}f} ± {half:.{digits}f}" for digits in range(4)}
        for cell in re.findall(r"-?\d[\d.]* ± \d[\d.]*(?<!\.)(?![\d.]* %)", section):
            if cell not in known:
                yield f"docs/results/studies.md has {cell}, its files do not"


def intervals(arms: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    for arm in arms:
        for name in arm["runs"][0]["figures"]:
            values = [run["figures"][name] for run in arm["runs"]]
            yield sum(values) / len(values), half_width(values) or 0.0
        for found in (arm.get("differences") or {}).values():
            yield found["mean"], found["half_width"]


def stale_results() -> Iterator[str]:
    """Stored figures that the code no longer makes of the stored curves."""
    outcomes = [
        asdict(alarm.outcome(file.stem, arm, run))
        for file in files("bottle_*", "division_*")
        for arm, runs in up_to_shortest(read_curve_file(file)).items()
        for run in runs
    ]
    if outcomes != stored("alarm")["runs"]:
        yield "alarm.json is stale"
    record = stored("advice")
    found, _ = advice.read_all([RESULTS / f"{name}.json" for name in record["files"]])
    studies = [advice.study_of(name, runs[a], runs[b]) for name, (runs, a, b) in found.items()]
    if json.loads(json.dumps([asdict(each) for each in studies])) != record["studies"]:
        yield "advice.json is stale"
    for record in (stored(f"correlation{part}") for part in PARTS):
        runs, _ = read_all([ROOT / x for x in record["command"] if x.startswith("benchmarks/")])
        # Intervals need all draws, which take seconds.
        new = {each.name: each.spearman.value for each in correlate(runs, draws=2)}
        for old in record["correlations"]:
            if abs(new[old["name"]] - old["spearman"]["value"]) > 1e-9:
                yield f"{old['name']} of a file of correlations is stale"


def stale_figures() -> Iterator[str]:
    """Pictures that the stored results draw otherwise."""
    for name, draw in figure.PICTURES.items():
        if (figure.DOCS / f"{name}.svg").read_text() != draw():
            yield f"docs/results/{name}.svg is stale; run benchmarks/figure.py"


def folders_of_one_machine() -> Iterator[str]:
    for name in (file.stem for file in files("study_*", "curves_*")):
        paths = [run["path"] for arm in stored(name).get("rows", []) for run in arm["runs"]]
        if any(word.startswith("/") for word in [*stored(name)["command"], *paths]):
            yield f"benchmarks/results/{name}.json names a folder of one machine"


def main() -> int:
    checks = (missing_on_pages, intervals_of_studies, stale_results, stale_figures)
    problems = [problem for check in (*checks, folders_of_one_machine) for problem in check()]
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
