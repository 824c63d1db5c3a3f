"""Figures hold the numbers they were given, and Plotly accepts all of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moored.analysis.figures import (
    DASHES,
    PALETTE,
    Bars,
    Curve,
    Cuts,
    PlanePath,
    arm_chart,
    bar_chart,
    color_of,
    dash_of,
    line_chart,
    phase_chart,
    plane_chart,
    variance_histogram,
)
from moored.analysis.study_table import Mean


def charts() -> dict[str, dict]:
    """One of each kind, with every option in use."""
    curve = Curve(name="a", x=[1, 2], y=[0.1, 0.2], low=[0.0, 0.1], high=[0.2, 0.3], has_dots=True)
    faint = Curve(name="a", x=[1, 2], y=[0.1, 0.2], is_faint=True)
    path = PlanePath(
        name="run", entropy=[1.0, 0.5], mi=[0.4, 0.1], texts=["1", "2"], kinds=["good", "bad"]
    )
    return {
        "line": line_chart([faint, curve], y_title="share", alarm_step=2, level=("chance", 0.1)),
        "plane": plane_chart([path], Cuts(entropy=0.7, mi=0.2)),
        "phases": phase_chart([1, 2], {"rollout": [1.0, 2.0], "update": [0.5, 0.5]}, 2),
        "histogram": variance_histogram(np.array([0.2]), np.array([0.0, 0.0])),
        "arms": arm_chart(
            {"none": Mean(mean=0.5, half_width=None, by_seed={0: 0.5})},
            {"none": 0},
            x_title="share",
        ),
        "bars": bar_chart(
            ["1"],
            [Bars(name="task", values=[2.0], low=[1.5], high=[3.0])],
            x_title="bucket",
            y_title="norm",
        ),
    }


@pytest.mark.parametrize("name", charts())
def test_plotly_accepts_every_figure_and_json_holds_it(name):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    chart = charts()[name]
    assert len(graph_objects.Figure(chart).data) == len(chart["data"])
    json.dumps(chart, allow_nan=False)


def test_a_band_runs_along_the_high_edge_and_back_along_the_low_one():
    curve = Curve(name="a", x=[1, 2], y=[5.0, 6.0], low=[4.0, 5.5], high=[7.0, 8.0])
    band, line = line_chart([curve], y_title="")["data"]
    assert band["x"] == [1, 2, 2, 1] and band["y"] == [7.0, 8.0, 5.5, 4.0]
    assert line["y"] == [5.0, 6.0]


def test_an_axis_ends_where_no_figure_can_be_and_elsewhere_leaves_room():
    def axis(y_title: str, *values: float) -> list[float]:
        curve = Curve(name="a", x=range(len(values)), y=values)
        return line_chart([curve], y_title=y_title)["layout"]["yaxis"]["range"]

    # An edge of 1.5 % shows a line at a limit in its full width.
    assert axis("share", 0.0, 0.2) == pytest.approx([-0.003, 0.213], abs=1e-3)
    assert axis("share", 0.9, 1.0) == pytest.approx([0.893425, 1.001575], abs=1e-3)
    assert axis("share", 1.0, 1.0) == [-0.015, 1.015]
    assert axis("seconds", 2.0, 2.0)[0] == pytest.approx(-0.06)
    assert axis("tokens", 30.0, 32.0)[0] == pytest.approx(29.867, abs=1e-2)
    # Outside of what was thought possible, and where nothing is known: all of it is shown.
    assert axis("share", -0.2, 0.8)[0] == pytest.approx(-0.218)
    assert axis("mean over turns", -0.2, -0.2) == pytest.approx([-0.406, 0.006])


def test_a_band_ends_where_no_figure_can_be():
    curve = Curve(name="a", x=[1, 2], y=[0.5, 0.9], low=[-0.5, 0.8], high=[1.5, 1.0])
    band = line_chart([curve], y_title="share")["data"][0]
    assert band["y"] == [1.0, 1.0, 0.8, 0.0]


def test_the_alarm_is_a_line_at_its_step():
    chart = line_chart([Curve(name="a", x=[1, 9], y=[0, 0])], y_title="", alarm_step=7)
    (line,) = chart["layout"]["shapes"]
    assert line["x0"] == line["x1"] == 7
    assert [note["text"] for note in chart["layout"]["annotations"]] == ["alarm"]


def test_a_number_that_is_not_finite_leaves_a_gap():
    (line,) = line_chart([Curve(name="a", x=[1, 2], y=[float("nan"), 1 / 3])], y_title="")["data"]
    assert line["y"] == [None, 0.3333]


def test_the_plane_names_the_four_regimes_where_they_are():
    names = {
        note["text"]: (note["xanchor"], note["yanchor"])
        for note in charts()["plane"]["layout"]["annotations"]
    }
    assert names == {
        "<i>compressed</i>": ("left", "top"),
        "<i>diverse</i>": ("right", "top"),
        "<i>low entropy collapse</i>": ("left", "bottom"),
        "<i>template collapse</i>": ("right", "bottom"),
    }


def test_the_histogram_counts_kept_and_dropped_groups_apart():
    chart = variance_histogram(np.array([0.9, 1.0]), np.array([0.0, 0.04, 0.9]), num_bins=10)
    kept, dropped = (trace["y"] for trace in chart["data"])
    assert kept == [0] * 9 + [2] and dropped == [2] + [0] * 8 + [1]
    assert chart["layout"]["barmode"] == "stack"


def test_error_bars_reach_from_the_value_to_the_ends_of_its_interval():
    error = charts()["bars"]["data"][0]["error_y"]
    assert (error["array"], error["arrayminus"]) == ([1.0], [0.5])


def test_forty_curves_look_different():
    num = len(PALETTE) * len(DASHES)
    assert num == 40 and len({(color_of(k), dash_of(k)) for k in range(num)}) == num


def test_a_run_of_one_step_shows_a_point_in_every_figure():
    (line,) = line_chart([Curve(name="a", x=[1], y=[0.5])], y_title="")["data"]
    assert line["mode"] == "lines+markers" and line["marker"]["size"] > 0
    (phase,) = phase_chart([1], {"rollout": [2.0]}, None)["data"]
    assert phase["mode"] == "lines+markers"
    assert (
        line_chart([Curve(name="a", x=[1, 2], y=[0, 1])], y_title="")["data"][0]["mode"] == "lines"
    )
