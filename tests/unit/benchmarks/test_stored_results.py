"""What is stored about curves is what the code says of them today, and pages have its numbers."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moored.analysis.compare import half_width
from moored.analysis.correlate import Correlation, Estimate, correlate
from moored.analysis.curve_files import (
    StoredRun,
    read_curve_file,
    up_to_shortest,
    write_curve_file,
)
from moored.analysis.run_curves import read_all
from moored.diagnostics.resampling import wilson_interval

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
BOTTLES = sorted(RESULTS.glob("bottle_*.json"))
DIVISION = ("division_bottle", "division_ppo", "division_mini")
ALGORITHMS = {"grpo": "GRPO", "no_division": "no division", "ppo": "PPO"}
FILTERS = {"none": "no filter", "top_p": "top-p 0.9", "outcome": "gate on the outcome"}


@pytest.fixture
def script(monkeypatch):
    """Import a script of `benchmarks/` by name, as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_stored_outcomes_of_the_alarm_are_those_of_the_stored_curves(script):
    outcome = script("alarm").outcome
    found = [
        asdict(outcome(file.stem, arm, run))
        for file in [*BOTTLES, *sorted(RESULTS.glob("division_*.json"))]
        for arm, runs in up_to_shortest(read_curve_file(file)).items()
        for run in runs
    ]
    assert found == json.loads((RESULTS / "alarm.json").read_text())["runs"]


@pytest.mark.parametrize("part", ["", "_sokoban", "_frozen_lake"])
def test_the_stored_correlations_are_those_of_the_stored_curves(part):
    stored = json.loads((RESULTS / f"correlation{part}.json").read_text())
    files = [ROOT / word for word in stored["command"] if word.startswith("benchmarks/")]
    if not part:
        assert files == [*BOTTLES, *sorted(RESULTS.glob("curves_*.json"))]
    runs, _ = read_all(files)
    assert [run.name for run in runs] == stored["runs"]
    # Intervals need all draws, which take seconds over many runs.
    has_intervals = part == "_frozen_lake"
    found = correlate(runs) if has_intervals else correlate(runs, draws=2)
    compared = ("value", "low", "high") if has_intervals else ("value",)
    new = {each.name: [getattr(e, key) for e in shown(each) for key in compared] for each in found}
    assert new.keys() == {old["name"] for old in stored["correlations"]}
    for old in stored["correlations"]:
        estimates = [old["spearman"], old["pearson"], *old["by_arm"].values()]
        assert new[old["name"]] == pytest.approx([e[key] for e in estimates for key in compared])


def shown(found: Correlation) -> list[Estimate]:
    return [found.spearman, found.pearson, *found.by_arm.values()]


def test_the_page_on_correlations_has_the_stored_numbers():
    page = (ROOT / "docs" / "results" / "correlation.md").read_text()
    cells = []
    for found in correlations():
        of_lags = [found["by_lag"][lag] for lag in ("-20", "-10", "0", "10", "20")]
        cells += [found["spearman"], found["pearson"], found["between_seeds"], *of_lags]
    for found in correlations("_sokoban"):
        of_arms = [found["by_arm"].get(arm) for arm in ("none", "top_p")]
        cells += [found["spearman"], *filter(None, of_arms)]
    cells += [found["spearman"] for found in correlations("_frozen_lake")]
    for each in cells:
        cell = f"{each['value']:+.2f} [{each['low']:+.2f}, {each['high']:+.2f}]"
        assert cell.replace("-", "−") in page, cell


def correlations(part: str = "") -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"correlation{part}.json").read_text())["correlations"]


def test_the_picture_of_the_correlations_is_up_to_date(script, tmp_path):
    drawn = tmp_path / "drawn.svg"
    tasks = {"Sokoban": "sokoban", "FrozenLake": "frozen_lake"}
    parts = [
        f"--part={task}={RESULTS / f'correlation_{name}.json'}" for task, name in tasks.items()
    ]
    words = [str(RESULTS / "correlation.json"), *parts, "--out", str(drawn)]
    script("correlation_figure").main(words)
    assert drawn.read_text() == (ROOT / "docs" / "results" / "correlation.svg").read_text()


def test_start_and_end_of_curves_are_the_first_twentieth_and_the_last_fifth(script):
    curves = script("curves")
    curve = [(step, float(step)) for step in range(1, 101)]
    assert curves.start_of(curve) == 3.0  # steps 1 to 5
    assert curves.end_of(curve) == 90.5  # steps 81 to 100
    assert curves.start_of([(50, 7.0), (100, 9.0)]) == 7.0


def test_the_page_on_collapse_has_what_the_stored_curves_say_of_replies_and_kept_groups(script):
    curves = script("curves")
    page = (ROOT / "docs" / "results" / "collapse.md").read_text()
    section = page[page.index("## Reply length") : page.index("## Where PPO stands")]
    smollm2 = ("grpo", "ppo", "first", "pair", "long")
    files = [*BOTTLES, *sorted(RESULTS.glob("curves_*.json")), RESULTS / "sokoban_mini.json"]
    files += [file for end in smollm2 for file in sorted(RESULTS.glob(f"smollm2_*_{end}.json"))]
    files += [RESULTS / f"{name}.json" for name in ("smollm2_division", *DIVISION)]
    grows = {line[0]: line[1:] for line in curves.growth_lines(files, "reply tokens")}
    for arm, name in {**FILTERS, "lowest_half": "lowest half"}.items():
        assert f"| {' | '.join([name, *grows[arm]])} |" in section
    kept = {line[0]: line[1:] for line in curves.growth_lines(files, "kept")}["top_p"]
    lost, held = kept[0].replace("of", "of the"), kept[1].replace("of", "of the")
    assert f"{lost} runs that collapsed and in {held} others" in " ".join(section.split())
    rows = re.findall(r"^\| .*, (PPO|GRPO), .*`(\w+\.json)`\) \| (.*) \| (.*) \|$", section, re.M)
    assert len(rows) == 7
    for algorithm, name, *cells in rows:
        header, *lines = curves.table_of(read_curve_file(RESULTS / name))
        arms = ("top_p", f"{algorithm.lower()}/top_p")
        (place,) = (k for k, arm in enumerate(header) if arm in arms)
        found = {line[0]: line[place] for line in lines}
        assert cells == [found["kept"], found["success"]]


@pytest.mark.parametrize(
    ("name", "num_arms"), [("bottle", 6), ("bottle_gate", 2), ("bottle_ppo", 2), ("bottle_mini", 6)]
)
def test_the_page_on_collapse_has_every_arm_of_the_division(name, num_arms):
    page = (ROOT / "docs" / "results" / "collapse.md").read_text()
    rows = json.loads((RESULTS / f"study_{name}.json").read_text())["rows"]
    assert len(rows) == num_arms
    for row in rows:
        collapsed = [run["has_collapsed"] for run in row["runs"]]
        low, high = wilson_interval(sum(collapsed), len(collapsed))
        cells = [
            f"{ALGORITHMS[row['arms']['algorithm']]}, {FILTERS[row['arms']['filter']]}",
            f"{sum(collapsed)} of {len(collapsed)} [{low:.2f}, {high:.2f}]",
        ]
        for figure in ("success", "MI", "outcome-free share"):
            found = row["figures"][figure]
            cells.append(f"{found['mean']:.3f} ± {found['half_width']:.3f}")
        assert f"| {' | '.join(cells)} |" in page


def test_every_interval_on_the_page_of_studies_is_one_of_the_stored_runs():
    page = (ROOT / "docs" / "results" / "studies.md").read_text()
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        (name,) = re.findall(r"benchmarks/results/(study_\w+\.json)", section)
        table = json.loads((RESULTS / name).read_text())
        known = {
            f"{mean:.{digits}f} ± {half:.{digits}f}"
            for mean, half in intervals(table)
            for digits in range(4)
        }
        found = re.findall(r"([−+]?)(\d[\d.]*\d|\d) ±\s(\d[\d.]*\d|\d)(?![\d ]*%)", section)
        assert found or "%" in section, name
        for sign, mean, half in found:
            cell = f"{'-' * (sign == '−')}{mean} ± {half}"
            assert cell in known, (name, cell)


def intervals(table: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Mean and half of the interval of every figure of every arm, and of its differences."""
    for row in table["rows"]:
        for figure in row["runs"][0]["figures"]:
            values = [run["figures"][figure] for run in row["runs"]]
            yield sum(values) / len(values), half_width(values) or 0.0
        for found in (row.get("differences") or {}).values():
            yield found["mean"], found["half_width"]


def test_what_is_stored_of_studies_names_no_folder_of_one_machine():
    files = [*RESULTS.glob("study_*.json"), *RESULTS.glob("curves_*.json")]
    assert len(files) >= 12
    for file in files:
        stored = json.loads(file.read_text())
        paths = [run["path"] for row in stored.get("rows", []) for run in row["runs"]]
        for word in [*stored["command"], *paths]:
            assert not word.startswith("/"), (file.name, word)


def test_the_page_of_smollm2_has_what_the_stored_curves_say(script):
    curves = script("curves")
    page = (ROOT / "docs" / "results" / "smollm2.md").read_text()
    for name, pairs in (
        ("division", [("grpo/top_p", "grpo/none"), ("no_division/none", "grpo/none")]),
        ("engines", [("moored", "plain"), ("lora", "plain")]),
    ):
        runs = read_curve_file(RESULTS / f"smollm2_{name}.json")
        assert {len(of_arm) for of_arm in runs.values()} == {3}
        lines = [line for line in curves.lines_of_runs(runs)[1:] if line[1] != "mean"]
        if name == "division":  # Three arms by seed, the others as means.
            three = ("grpo/none", "grpo/top_p", "no_division/none")
            lines = [line for line in lines if line[0] in three]
            lines += [line for line in curves.lines_of_runs(runs)[1:] if line[1] == "mean"]
        lines += [curves.paired_line(runs, *pair) for pair in pairs]
        for _, *cells in lines:
            assert f"| {' | '.join(cells)} |" in page
    others = ("sokoban_ppo", "frozen_lake_ppo", "frozen_lake_grpo", "countdown_grpo")
    others += ("countdown_ppo", "metamath_grpo", "metamath_ppo", "gsm8k_grpo", "gsm8k_ppo")
    for name in (*others, "sokoban_ppo_long"):
        runs = read_curve_file(RESULTS / f"smollm2_{name}.json")
        header, *lines = curves.lines_of_runs(runs)
        shown = ("success", "MI, swap", "MI", "H(Z|X)", "validity", "reply tokens")
        places = [header.index(column) for column in shown]
        for line in lines:
            if line[1] == "mean" or len(runs[line[0]]) == 1:
                cells = " | ".join(line[place] for place in places)
                assert f"| {len(runs[line[0]])} | {cells} |" in page
        if len(runs["none"]) == len(runs["top_p"]) == 3:
            assert curves.paired_line(runs, "top_p", "none")[2] in page


def test_ends_of_a_curve_are_means_over_ten_steps_or_single_looks(script):
    curves = script("curves")
    curve = [(step, float(step)) for step in range(1, 10)] + [(s, 0.0) for s in range(10, 21)]
    run = StoredRun(seed=0, alarm_step=None, curves={"success": curve, "MI": curve})
    assert curves.ends_of(run, "success") == (4.5, 0.0)
    assert curves.ends_of(run, "MI") == (1.0, 0.0)
    assert curves.ends_of(run, "retrieval") is None


def test_arms_are_compared_by_seed(script):
    def arm(values: dict[int, float]) -> list[StoredRun]:
        return [
            StoredRun(seed=seed, alarm_step=None, curves={"success": [(1, value)]})
            for seed, value in values.items()
        ]

    runs = {"none": arm({0: 0.1, 1: 0.2, 2: 0.9}), "top_p": arm({0: 0.3, 1: 0.4})}
    # Both pairs differ by 0.2; seed 2 has no partner.
    line = script("curves").paired_line(runs, "top_p", "none")
    assert line[:3] == ["top_p − none", "2 pairs", "+0.20 ± 0.00"]


def test_arms_of_one_factor_are_paired_where_the_others_are_the_same(script):
    names = ["grpo/none", "grpo/top_p", "no_division/none", "ppo/top_p"]
    assert script("curves").pairs_of(names) == [
        ("grpo/top_p", "grpo/none"),
        ("no_division/none", "grpo/none"),
    ]


def test_runs_in_which_a_curve_grows_are_counted_by_how_they_ended(script, tmp_path):
    def stored(lengths: tuple[float, float], mi: tuple[float, float]) -> StoredRun:
        def curve(ends: tuple[float, float]) -> list[tuple[int, float]]:
            return [(step, ends[step > 15]) for step in range(1, 21)]

        curves = {"success": curve((0.1, lengths[1])), "kept": curve(lengths), "MI": curve(mi)}
        return StoredRun(seed=0, alarm_step=None, curves=curves)

    held, lost = (0.4, 0.5), (0.4, 0.1)
    none = [stored((30, 20), lost), stored((30, 40), lost), stored((30, 20.5), held)]
    write_curve_file(tmp_path / "a.json", {"none": none, "top_p": [stored((30, 41), held)]}, {})
    write_curve_file(tmp_path / "b.json", {"x/none": none[:1]}, {})  # the same run again
    lines = script("curves").growth_lines([tmp_path / "a.json", tmp_path / "b.json"], "kept")
    assert lines[1:] == [["none", "1 of 2", "0 of 1"], ["top_p", "0 of 0", "1 of 1"]]
