"""Learning-rate factors worked out by hand."""

from __future__ import annotations

import pytest

from moored.algo import lr_factor
from moored.errors import MooredError


def factors(num_steps: int, **options) -> list[float]:
    return [lr_factor(step, num_steps, **options) for step in range(1, num_steps + 1)]


def test_constant_is_one_after_a_straight_warmup():
    assert factors(3) == [1, 1, 1]
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_falls_in_equal_steps_and_the_last_step_still_learns():
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2, min_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    )


def test_cosine_is_slow_at_both_ends_and_half_in_the_middle():
    # (1 + cos(k pi / 4)) / 2 for k = 0, 1, 2, 3
    assert factors(4, schedule="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert lr_factor(3, 4, schedule="cosine", min_ratio=0.1) == pytest.approx(0.55)


def test_steps_after_the_last_stay_at_the_smallest_rate():
    assert lr_factor(9, 4, schedule="linear", min_ratio=0.1) == pytest.approx(0.1)


def test_a_warmup_longer_than_the_run_never_ends():
    assert factors(2, schedule="cosine", warmup_steps=10) == [0.1, 0.2]


def test_unknown_schedules_and_step_zero_are_refused():
    with pytest.raises(MooredError, match="did you mean 'cosine'"):
        lr_factor(1, 4, schedule="cosin")
    with pytest.raises(MooredError, match="counted from 1"):
        lr_factor(0, 4)
