"""The groups of the next step, rolled out beside an update."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from moored.rollout.ahead import Ahead
from moored.types import Group, Prompt, StopReason, Trajectory, Turn


def group(step: int) -> Group:
    turn = Turn(
        prompt=Prompt(np.arange(3)),
        completion_ids=np.array([4, 5]),
        logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        think_span=None,
        answer_span=(0, 1),
        reply="x",
        seen="y",
        observation_start=None,
        reward=0.5,
        penalty=0.0,
        is_valid=True,
        policy_version=step,
    )
    ended = Trajectory(
        env="e",
        task_seed=1,
        episode_seed=0,
        turns=(turn,),
        stop=StopReason.DONE,
        success=True,
        metrics={},
    )
    return Group(group_id=step, env="e", task_seed=1, trajectories=(ended,))


def test_without_a_lag_groups_are_rolled_out_when_they_are_taken():
    asked = []
    ahead = Ahead(lambda step, _: asked.append(step) or [group(step)], max_lag=0)
    ahead.begin(2)
    assert ahead.wait() == 0.0
    assert asked == []
    assert [g.group_id for g in ahead.take(2)] == [2]
    assert asked == [2]


def test_with_a_lag_the_rollout_runs_while_the_caller_goes_on():
    may_end, asked = threading.Event(), []

    def roll_out(step, _):
        asked.append(threading.current_thread())
        assert may_end.wait(10)
        return [group(step)]

    ahead = Ahead(roll_out, max_lag=1)
    ahead.begin(2)
    may_end.set()
    assert ahead.wait() > 0.0
    assert [g.group_id for g in ahead.take(2)] == [2]
    assert len(asked) == 1 and asked[0] is not threading.current_thread()


def test_what_the_rollout_raises_is_raised_where_it_is_waited_for():
    def roll_out(step, _):
        raise KeyError("lost")

    ahead = Ahead(roll_out, max_lag=1)
    ahead.begin(2)
    with pytest.raises(KeyError, match="lost"):
        ahead.wait()


def test_a_dropped_rollout_ends_at_its_next_reply():
    begun, ended = threading.Event(), threading.Event()

    def roll_out(step, on_replies):
        try:
            while True:
                begun.set()
                on_replies(1, 1)
        finally:
            ended.set()

    ahead = Ahead(roll_out, max_lag=1)
    ahead.begin(2)
    assert begun.wait(10)
    ahead.drop()
    assert ended.is_set()


def test_a_dropped_rollout_that_ends_late_is_not_taken_for_the_next_one():
    may_end, begun = threading.Event(), threading.Event()

    def roll_out(step, _):
        begun.set()
        assert may_end.wait(10)
        return [group(step)]

    ahead = Ahead(roll_out, max_lag=1)
    ahead.begin(2)
    assert begun.wait(10)
    threading.Timer(0.05, may_end.set).start()
    ahead.drop()
    assert may_end.is_set()  # nothing samples any more
    ahead.begin(3)
    ahead.wait()
    assert [g.group_id for g in ahead.take(3)] == [3]


def test_groups_that_wait_are_saved_and_come_back(tmp_path):
    pytest.importorskip("pyarrow")
    ahead = Ahead(lambda step, _: [group(step)], max_lag=1)
    ahead.begin(7)
    ahead.wait()
    ahead.save(tmp_path)
    other = Ahead(lambda step, _: [], max_lag=1)
    other.load(tmp_path, 7)
    (found,) = other.take(7)
    (turn,) = found.trajectories[0].turns
    assert (found.group_id, turn.policy_version) == (7, 7)
    assert turn.logprobs.tolist() == [-0.5, -0.25]


def test_without_a_lag_nothing_is_saved(tmp_path):
    ahead = Ahead(lambda step, _: [group(step)], max_lag=0)
    ahead.take(1)
    ahead.begin(2)
    ahead.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
