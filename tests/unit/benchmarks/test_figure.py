"""What `benchmarks/figure.py` draws, and what it refuses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def figure(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    return importlib.import_module("figure")


def test_a_band_is_students_interval_of_the_mean(figure):
    # Two seeds, 0 and 2: mean 1, standard deviation sqrt(2), over sqrt(2) seeds, times t = 12.706.
    (point,) = figure.over_seeds([[(5, 0.0)], [(5, 2.0)]])
    assert point == pytest.approx((5, 1.0, 12.706))


def test_a_panel_says_how_far_bands_reach_that_it_cuts(figure):
    wide = {"none": [[(1.0, 0.0, 0.1), (2.0, 1.0, 9.0)]]}
    # 1 ± 9 beside curves from 0 to 1; a success rate ends at 0 and 1, where nothing is cut.
    assert "bands reach from \u22128 to 10" in figure.panel("MI", wide, 0.0, 0.0)
    assert "bands reach" not in figure.panel("success", wide, 0.0, 0.0)
    narrow = {"none": [[(1.0, 0.0, 0.1), (2.0, 1.0, 0.1)]]}
    assert "bands reach" not in figure.panel("MI", narrow, 0.0, 0.0)


def test_an_unknown_arm_is_refused_with_those_that_exist(figure, tmp_path, capsys):
    words = ["benchmarks/results/bottle_cpu.json", "--arms", "top-p", "--out", str(tmp_path / "x")]
    with pytest.raises(SystemExit):
        figure.main(words)
    assert "it has ['none', 'top_p', 'lowest_half']" in capsys.readouterr().err


def test_each_seed_is_a_line_without_a_band(figure):
    assert figure.each_seed([[(5, 0.0)], [(5, 2.0)]]) == [[(5, 0.0, 0.0)], [(5, 2.0, 0.0)]]


@pytest.mark.parametrize("text", ["", "{}", '{"runs": {}}', '{"runs": {"none": []}}'])
@pytest.mark.parametrize("script", ["figure", "curves"])
def test_an_empty_curve_file_is_one_sentence(figure, tmp_path, capsys, script, text):
    (file := tmp_path / "x.json").write_text(text)
    words = ["--out", str(tmp_path / "x.svg")] if script == "figure" else []
    with pytest.raises(SystemExit):
        importlib.import_module(script).main([str(file), *words])
    assert "x.json' is not a curve file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("looks", "said"), [([], "no curve ['MI']"), ([[2, 0.1]], "no step in common")]
)
def test_curves_that_cannot_be_drawn_are_one_sentence(figure, tmp_path, capsys, looks, said):
    runs = [
        {"seed": 0, "alarm_step": None, "curves": {"success": [[1, 0], [2, 1]], "MI": found}}
        for found in ([[1, 0.2]], looks)
    ]
    (file := tmp_path / "x.json").write_text(json.dumps({"runs": {"none": runs}}))
    with pytest.raises(SystemExit):
        figure.main([str(file), "--panels", "MI", "--out", str(tmp_path / "x.svg")])
    assert said in capsys.readouterr().err
