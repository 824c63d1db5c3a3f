"""Records, their rewards, and rows that are left out."""

from __future__ import annotations

import math

import pytest

from moored.errors import ConfigError, MooredError
from moored.files.records import BadRow, Record, Skipped, parse_weights, usable


def record(**rewards: float) -> Record:
    return Record(step=None, prompt="x", response="y", rewards=rewards)


def test_the_reward_is_the_sum_of_what_is_known():
    assert record(a=0.1, b=0.2, c=math.nan).reward == pytest.approx(0.3)
    assert math.isnan(record(a=math.nan).reward)
    assert math.isnan(record().reward)


def test_bad_rows_stop_the_reading_unless_they_are_torn_or_skipped():
    good, bad = record(), BadRow("f, line 2", "is bad")
    torn = BadRow("f, line 9", "is not JSON", is_torn=True)
    skipped = Skipped()
    assert list(usable([bad, good, torn], skipped, skip_bad=True)) == [good]
    assert (skipped.num_bad, skipped.torn) == (1, ["f, line 9"])
    with pytest.raises(MooredError, match=r"line 2 is bad; .*--skip-bad"):
        list(usable([good, bad], Skipped()))


def test_weights_are_one_unless_they_are_given():
    assert parse_weights(["a", "b=0.5"]) == {"a": 1.0, "b": 0.5}
    with pytest.raises(ConfigError, match="COLUMN=WEIGHT, got 'b=much'"):
        parse_weights(["b=much"])
