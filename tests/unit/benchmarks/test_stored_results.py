"""What is stored about the bottle's curves is what the code says of them today."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from moored.analysis.correlate import correlate
from moored.analysis.curve_files import read_curve_file, up_to_shortest
from moored.analysis.run_curves import read_all

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
BOTTLES = sorted(RESULTS.glob("bottle_*.json"))


@pytest.fixture
def script(monkeypatch):
    """Import a script of `benchmarks/` by name, as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_stored_outcomes_of_the_alarm_are_those_of_the_stored_curves(script):
    outcome = script("alarm").outcome
    found = [
        asdict(outcome(file.stem, arm, run))
        for file in BOTTLES
        for arm, runs in up_to_shortest(read_curve_file(file)).items()
        for run in runs
    ]
    assert found == json.loads((RESULTS / "alarm.json").read_text())["runs"]


def test_the_stored_correlations_are_those_of_the_stored_curves():
    stored = json.loads((RESULTS / "correlation.json").read_text())
    runs, _ = read_all(BOTTLES)
    assert [run.name for run in runs] == stored["runs"]
    found = {each.name: each for each in correlate(runs)}
    for old in stored["correlations"]:
        new = found[old["name"]]
        assert asdict(new.spearman) == pytest.approx(old["spearman"])
        assert asdict(new.pearson) == pytest.approx(old["pearson"])
        for arm, estimate in old["by_arm"].items():
            assert asdict(new.by_arm[arm]) == pytest.approx(estimate)


def test_the_page_on_correlations_has_the_stored_numbers():
    page = (ROOT / "docs" / "results" / "correlation.md").read_text()
    for found in json.loads((RESULTS / "correlation.json").read_text())["correlations"]:
        of_lags = [found["by_lag"][lag] for lag in ("-20", "-10", "0", "10", "20")]
        for each in [found["spearman"], found["pearson"], found["between_seeds"], *of_lags]:
            cell = f"{each['value']:+.2f} [{each['low']:+.2f}, {each['high']:+.2f}]"
            assert cell.replace("-", "−") in page, (found["name"], cell)


def test_the_picture_of_the_correlations_is_up_to_date(script, tmp_path):
    drawn = tmp_path / "drawn.svg"
    script("correlation_figure").main([str(RESULTS / "correlation.json"), "--out", str(drawn)])
    assert drawn.read_text() == (ROOT / "docs" / "results" / "correlation.svg").read_text()


def test_start_and_end_of_curves_are_the_first_twentieth_and_the_last_fifth(script):
    curves = script("curves")
    curve = [(step, float(step)) for step in range(1, 101)]
    assert curves.start_of(curve) == 3.0  # steps 1 to 5
    assert curves.end_of(curve) == 90.5  # steps 81 to 100
    assert curves.start_of([(50, 7.0), (100, 9.0)]) == 7.0
