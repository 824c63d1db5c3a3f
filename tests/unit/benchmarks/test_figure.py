"""The pictures of the docs: which there are, and what stands in them."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from moored.analysis.figures import Curve, line_chart

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "results"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figure(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("figure")


def test_every_picture_of_the_docs_is_drawn_by_the_script(figure):
    assert {file.stem for file in DOCS.glob("*.svg")} == set(figure.PICTURES)


def test_the_picture_of_the_readme_is_that_of_the_stored_runs(figure, tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "DOCS", tmp_path)
    figure.main(["readme"])
    assert (tmp_path / "readme.svg").read_text() == (DOCS / "readme.svg").read_text()


def test_a_band_is_students_interval_of_the_mean(figure):
    # Two seeds, 0 and 2: mean 1, standard deviation sqrt(2), over sqrt(2) seeds, times t = 12.706.
    curve = figure.over_seeds([[(5, 0.0)], [(5, 2.0)]], "", 0)
    assert (curve.x, curve.y) == ([5], [1.0])
    assert [*curve.low, *curve.high] == pytest.approx([-11.706, 13.706], abs=1e-3)


def test_lines_bands_and_notes_of_a_chart_stand_where_its_axes_say(figure):
    curve = Curve(name="a < b", x=[0, 100], y=[0.0, 1.0], low=[-9.0, 0.5], high=[9.0, 1.5])
    chart = line_chart([curve], y_title="nats per token")
    drawn = ET.fromstring(figure.svg({"MI": chart}, width=300, height=246))
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"a < b", "MI", "nats per token", "step", "50"} <= set(texts)
    assert "bands reach from \u22129 to 9" in texts
    (line,) = drawn.iter(f"{SVG}polyline")
    (band,) = drawn.iter(f"{SVG}polygon")
    (x0, y0), (x1, y1) = places(line)
    # The axis ends 2 % beyond step 100, at 300 - 14; the cut band is as wide as the line.
    assert x0 + (286 - x0) / 1.02 == pytest.approx(x1, abs=0.1) and y1 < y0
    assert [x for x, _ in places(band)] == [x0, x1, x1, x0]


def places(drawn: ET.Element) -> list[tuple[float, float]]:
    pairs = (point.split(",") for point in drawn.get("points", "").split())
    return [(float(x), float(y)) for x, y in pairs]


def test_an_unknown_picture_is_refused_with_those_that_exist(figure, capsys):
    with pytest.raises(SystemExit):
        figure.main(["nothing"])
    assert "smollm2_division" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.4, 11.0, [0, 5, 10]),
        (118, 121, [118, 119, 120, 121]),
        (0.2, 0.6, [0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_ticks_are_round_numbers_inside(figure, low, high, found):
    assert figure.ticks(low, high, 5) == pytest.approx(found)
