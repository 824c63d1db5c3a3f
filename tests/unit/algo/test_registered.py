"""Scores and rules of the user's own, by `module:attribute`."""

from __future__ import annotations

import numpy as np
import pytest

from moored import names
from moored.algo import StreamingFilter, select, select_groups
from moored.algo.filters import Ranking
from moored.algo.groups import GroupMoments, Score, mean
from moored.errors import MooredError

HERE = __name__
REWARDS = [[0.0, 1.0], [0.0, 3.0], [2.0, 2.0], [0.0, 2.0]]  # ranges 1, 3, 0, 2


def reward_range(groups: GroupMoments, _ddof: int) -> np.ndarray:
    return np.nanmax(groups.values_PG, axis=1) - np.nanmin(groups.values_PG, axis=1)


def plain_mean(groups: GroupMoments, _ddof: int) -> np.ndarray:
    return groups.mean_P


def one_number(_groups: GroupMoments, _ddof: int) -> float:
    return 1.0


OF_LENGTH = Score(mean, "length")
NUMBER = 3


def above_the_mean(ranking: Ranking) -> np.ndarray:
    return ranking.scores > ranking.value * ranking.scores.mean()


def the_same_twice(_: Ranking) -> np.ndarray:
    return np.array([0, 0])


def a_word(_: Ranking) -> str:
    return "all"


def test_a_score_of_ones_own_sees_the_rewards_of_each_group():
    selection = select_groups(REWARDS, score=f"{HERE}:reward_range", rule="top_k_count", value=2)
    assert selection.scores.tolist() == [1, 3, 0, 2]
    assert selection.kept.tolist() == [1, 3]
    assert selection.reward_stds is not None  # it is a score of rewards unless it says otherwise
    of_length = select_groups(REWARDS, score=f"{HERE}:OF_LENGTH")
    assert of_length.reward_stds is None and of_length.scores.tolist() == [0.5, 1.5, 2, 1]


def test_a_rule_of_ones_own_sees_candidates_best_first_and_may_return_a_mask():
    # Candidates 3, 2, 1 (not the zero): mean 2, so 1.0 * 2 keeps only the first.
    assert select([1, 3, 0, 2], rule=f"{HERE}:above_the_mean", value=1.0).tolist() == [1]
    # With the zero the mean is 1.5.
    kept = select([1, 3, 0, 2], rule=f"{HERE}:above_the_mean", value=1.0, keep_zero=True)
    assert kept.tolist() == [1, 3]
    # A rule of the user's own may take a value that no built-in rule takes.
    assert select([1, 3, 0, 2], rule=f"{HERE}:above_the_mean", value=-7.0).tolist() == [0, 1, 3]


def test_a_stream_takes_a_score_of_ones_own():
    stream = StreamingFilter(0.5, score=f"{HERE}:reward_range", warmup=0)
    assert [stream.offer(row) for row in ([0.0, 4.0], [0.0, 1.0])] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": f"{HERE}:the_same_twice"}, "positions without repeats of the 3 candidates"),
        ({"rule": f"{HERE}:a_word"}, "must return a slice, a mask or positions"),
        (
            {"rule": f"{HERE}:NUMBER"},
            "is of type int; name a function of a moored",
        ),
        ({"score": f"{HERE}:one_number"}, r"one number for each of 4 groups, got shape \(\)"),
        ({"score": f"{HERE}:NUMBER"}, "is of type int; name a function of the groups' moments"),
        ({"rule": f"{HERE}:above_the_meen"}, "did you mean 'above_the_mean'?"),
        ({"score": "variants"}, "did you mean 'variance'?"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_sentence(options, message):
    with pytest.raises(MooredError, match=message):
        select_groups(REWARDS, **options)


def test_a_group_with_fewer_than_two_rewards_scores_zero_by_a_score_of_ones_own_too():
    nan = float("nan")
    rewards = [[0.0, 1.0], [nan, nan], [nan, 5.0]]
    # The range of no reward at all is not a number, and the mean of one reward would be 5.
    assert select_groups(rewards, score=f"{HERE}:reward_range").scores.tolist() == [1, 0, 0]
    assert select_groups(rewards, score=f"{HERE}:plain_mean").scores.tolist() == [0.5, 0, 0]


def test_a_name_is_looked_up_once(monkeypatch):
    found = []
    monkeypatch.setattr(
        names, "import_object", lambda path, **_: found.append(path) or (lambda ranking: slice(1))
    )
    for _ in range(3):
        assert select([2.0, 1.0], rule="nowhere:of_one").tolist() == [0]
    assert found == ["nowhere:of_one"]
