"""Sizes that numbers are rounded up to."""

from __future__ import annotations

import pytest

from moored.engine.fast.buckets import bucket, power_bucket, tile_bucket


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 8), (8, 8), (9, 12), (13, 16), (17, 24), (100, 128), (129, 192), (193, 256), (1025, 1536)],
)
def test_both_have_two_sizes_for_every_power_of_two(size, expected):
    assert bucket(size, 8) == tile_bucket(size, 8) == expected


@pytest.mark.parametrize(
    ("size", "expected"), [(256, 256), (257, 384), (513, 640), (641, 768), (769, 896), (1024, 1024)]
)
def test_whole_tiles_count_where_each_takes_longer(size, expected):
    assert tile_bucket(size, 8) == tile_bucket(size, 128) == expected


def test_powers_of_a_base():
    assert [power_bucket(size, 64, 4) for size in (1, 64, 65, 257)] == [64, 64, 256, 1024]
