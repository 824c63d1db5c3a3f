"""The axis of a figure with bands: what it holds, and what it says where it cuts."""

from __future__ import annotations

import pytest

from moored.analysis import figures
from moored.analysis.axis import cut_axis


def test_a_band_much_wider_than_the_curves_is_cut_and_named():
    axis = cut_axis([0.0, 1.0], [-5.0, 3.0])
    assert axis is not None and axis.note == "bands reach from \u22125 to 3"
    # 0.6 heights of room on each side make 2.2, and 5 % of that is free.
    assert (axis.low, axis.high) == (pytest.approx(-0.71), pytest.approx(1.71))


def test_where_bands_fit_nothing_is_cut():
    assert cut_axis([0.0, 1.0], [-0.9, 1.9]) is None  # 2.8 is not 1.5 times 2.2
    assert cut_axis([0.0, 1.0], []) is None
    assert cut_axis([], [0.0, 1.0]) is None
    assert cut_axis([0.0, 0.0], [-1.0, 1.0]) is None


def test_a_curve_that_hardly_moves_stays_flat_beside_its_band():
    assert cut_axis([0.500, 0.501], [0.45, 0.55]) is None


def test_a_band_that_is_wide_on_one_side_leaves_no_empty_space_on_the_other():
    axis = cut_axis([1.0, 2.0], [0.9, 50.0])
    assert axis is not None
    assert (axis.low, axis.high) == (pytest.approx(0.9 - 0.085), pytest.approx(2.6 + 0.085))


@pytest.mark.parametrize(
    ("alarm_step", "side"), [(None, "left"), (2, "right"), (4, "right"), (9, "left")]
)
def test_how_far_bands_reach_is_not_written_over_the_alarm(alarm_step, side):
    curve = figures.Curve(name="", x=[1, 10], y=[0.0, 1.0], low=[-9.0, 0.5], high=[9.0, 1.5])
    layout = figures.line_chart([curve], y_title="", alarm_step=alarm_step)["layout"]
    (note,) = (note for note in layout["annotations"] if note.get("name") == figures.CUT)
    assert (note["xanchor"], note["x"]) == (side, 1 if side == "right" else 0)
