"""The trajectory-level baseline: the best and worst rollouts of each prompt."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from moored.algo import select_trajectories as select_rows
from moored.errors import MooredError

NAN = math.nan


def test_best_and_worst_trajectories_of_each_group():
    rewards = [[3, 1, 2, 0], [5, 5, 5, 5]]
    assert select_rows(rewards, best=1, worst=1).tolist() == [
        [True, False, False, True],
        [True, True, False, False],  # all tie: the earliest is best, the next one worst
    ]


def test_ties_never_change_how_many_trajectories_a_group_keeps():
    # 1 1 1 0: the first is best, of the rest the 0 is worst. 0 0 1 0: worst is the first 0.
    rewards = [[1, 1, 1, 0], [0, 0, 1, 0], [2, 2, 1, 1]]
    assert select_rows(rewards, best=1, worst=1).tolist() == [
        [True, False, False, True],
        [True, False, True, False],
        [True, False, True, False],
    ]
    rng = np.random.default_rng(0)
    for best, worst in itertools.product(range(4), range(1, 4)):
        many = rng.integers(0, 2, (30, 40)) * rng.integers(0, 2, (30, 1)).astype(float)
        chosen = select_rows(many, best=best, worst=worst)
        assert (chosen.sum(axis=1) == best + worst).all()
        for row, keeps in zip(many, chosen, strict=True):
            top = sorted(range(40), key=lambda i: -row[i])[:best]  # sorted is stable
            rest = sorted((i for i in range(40) if i not in top), key=lambda i: row[i])[:worst]
            assert np.flatnonzero(keeps).tolist() == sorted(top + rest)


def test_ties_keep_the_earlier_row_when_groups_are_interleaved():
    ids = np.tile([0, 1], 40)
    chosen = select_rows(np.zeros(80), ids, best=2, worst=1)
    assert np.flatnonzero(chosen).tolist() == [0, 1, 2, 3, 4, 5]


def test_trajectory_selection_skips_nan_and_keeps_small_groups_whole():
    chosen = select_rows([4, NAN, 2, 3, 1, 9], [0, 0, 0, 0, 0, 1], best=1, worst=1)
    assert chosen.tolist() == [True, False, False, False, True, True]


def test_trajectory_selection_needs_something_to_keep():
    with pytest.raises(MooredError, match="best=0, worst=0"):
        select_rows([[1, 2]], best=0, worst=0)
