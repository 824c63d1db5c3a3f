"""When a run is told that its success has not moved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moored.analysis.trend import no_progress


def said(rates: Sequence[float | None], *, num_steps: int = 60, num_groups: int = 16) -> str:
    """Of the first steps of a run that was to have so many, in parts of 10."""
    records = [
        {"step": step, "rollout/success_rate": rate, "filter/num_groups": float(num_groups)}
        for step, rate in enumerate(rates, start=1)
    ]
    return no_progress(records, num_steps) or ""


def test_a_flat_run_is_told_once_a_third_of_the_steps_has_brought_nothing():
    # 160 groups at 0.2: Wilson's interval is 0.1456 to 0.2686.
    flat = [0.2] * 30
    assert said(flat).startswith("no progress since step 10: success 0.20 in steps 1 to 10 ")
    assert "(95 % interval 0.15 to 0.27), 0.20 in steps 21 to 30" in said(flat)
    assert said(flat[:29]) == ""


@pytest.mark.parametrize(("level", "is_told"), [(0.26, True), (0.27, False)])
def test_success_has_moved_when_it_lies_above_the_interval(level, is_told):
    assert bool(said([0.2] * 20 + [level] * 10)) is is_told


def test_a_rising_run_is_not_told_and_one_that_stays_where_it_got_is_told_since_when():
    rising = [0.1 + 0.01 * step for step in range(60)]
    assert said(rising) == ""
    assert said([*rising[:40], *[0.4] * 20]).startswith("no progress since step 40: ")


def test_a_run_at_the_top_is_not_told():
    assert said([0.97] * 60) == ""
    assert said([0.3] * 10 + [0.94] * 50) == ""  # which may be 0.95
    assert said([0.3] * 10 + [0.85] * 50) != ""


def test_nothing_is_said_where_a_part_holds_too_few_groups_to_tell():
    assert said([0.5] * 60, num_groups=2) == ""
    assert said([0.0] * 60, num_groups=2) != ""


def test_steps_without_success_are_left_out():
    assert said([None] * 60) == said([]) == said([0.2] * 5, num_steps=5) == ""
    assert said([None] * 5 + [0.2] * 30).startswith("no progress since step 15: ")
