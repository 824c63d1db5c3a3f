"""Starts, ends and differences of stored curves, worked out by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from moored.analysis.curves import StoredRun, write_curve_file

ROOT = Path(__file__).parents[3]


@pytest.fixture
def curves(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("curves")


def test_start_and_end_of_curves_are_the_first_twentieth_and_the_last_fifth(curves):
    curve = [(step, float(step)) for step in range(1, 101)]
    assert curves.start_of(curve) == 3.0  # steps 1 to 5
    assert curves.end_of(curve) == 90.5  # steps 81 to 100
    assert curves.start_of([(50, 7.0), (100, 9.0)]) == 7.0


def test_runs_are_cut_to_the_shortest_with_alarms_after_it_forgotten(curves):
    def run(num_steps: int) -> StoredRun:
        success = [(step, 0.5) for step in range(1, num_steps + 1)]
        return StoredRun(seed=0, alarm_step=3, curves={"success": success})

    cut = curves.up_to_shortest({"a": [run(9)], "b": [run(2)]})
    assert [found.last_step for arm in cut.values() for found in arm] == [2, 2]
    assert cut["a"][0].alarm_step is None


def test_ends_of_a_curve_are_means_over_ten_steps_or_single_looks(curves):
    curve = [(step, float(step)) for step in range(1, 10)] + [(s, 0.0) for s in range(10, 21)]
    run = StoredRun(seed=0, alarm_step=None, curves={"success": curve, "MI": curve})
    assert curves.ends_of(run, "success") == (4.5, 0.0)
    assert curves.ends_of(run, "MI") == (1.0, 0.0)
    assert curves.ends_of(run, "retrieval") is None


def test_arms_are_compared_by_seed(curves):
    def arm(values: dict[int, float]) -> list[StoredRun]:
        return [
            StoredRun(seed=seed, alarm_step=None, curves={"success": [(1, value)]})
            for seed, value in values.items()
        ]

    runs = {"none": arm({0: 0.1, 1: 0.2, 2: 0.9}), "top_p": arm({0: 0.3, 1: 0.4})}
    # Both pairs differ by 0.2; seed 2 has no partner.
    line = curves.paired_line(runs, "top_p", "none")
    assert line[:3] == ["top_p − none", "2 pairs", "+0.20 ± 0.00"]


def test_arms_of_one_factor_are_paired_where_the_others_are_the_same(curves):
    names = ["grpo/none", "grpo/top_p", "no_division/none", "ppo/top_p"]
    assert curves.pairs_of(names) == [
        ("grpo/top_p", "grpo/none"),
        ("no_division/none", "grpo/none"),
    ]


def test_runs_in_which_a_curve_grows_are_counted_by_how_they_ended(curves, tmp_path):
    def stored(lengths: tuple[float, float], mi: tuple[float, float]) -> StoredRun:
        def curve(ends: tuple[float, float]) -> list[tuple[int, float]]:
            return [(step, ends[step > 15]) for step in range(1, 21)]

        curves = {"success": curve((0.1, lengths[1])), "kept": curve(lengths), "MI": curve(mi)}
        return StoredRun(seed=0, alarm_step=None, curves=curves)

    held, lost = (0.4, 0.5), (0.4, 0.1)
    none = [stored((30, 20), lost), stored((30, 40), lost), stored((30, 20.5), held)]
    write_curve_file(tmp_path / "a.json", {"none": none, "top_p": [stored((30, 41), held)]}, {})
    write_curve_file(tmp_path / "b.json", {"x/none": none[:1]}, {})  # the same run again
    lines = curves.growth_lines([tmp_path / "a.json", tmp_path / "b.json"], "kept")
    assert lines[1:] == [["none", "1 of 2", "0 of 1"], ["top_p", "0 of 0", "1 of 1"]]


@pytest.mark.parametrize("text", ["", "{}", '{"runs": {}}', '{"runs": {"none": []}}'])
def test_an_empty_curve_file_is_one_sentence(curves, tmp_path, capsys, text):
    (file := tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit):
        curves.main([str(file)])
    assert "x.json' is not a curve file" in capsys.readouterr().err
