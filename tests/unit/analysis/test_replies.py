"""Replies of several runs to the same tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moored.analysis.compare import TaskReplies, shared_replies
from moored.errors import MooredError
from moored.runlog.rollouts import write_groups
from moored.types import Group, Prompt, StopReason, Trajectory, Turn

pytest.importorskip("pyarrow.parquet")


def group(task: int, seen: str, reply: str) -> Group:
    turn = Turn(
        prompt=Prompt(np.array([1])),
        completion_ids=np.array([2]),
        logprobs=np.zeros(1, dtype=np.float32),
        reply=reply,
        seen=seen,
    )
    trajectory = Trajectory(
        env="toy", task_seed=task, episode_seed=0, turns=(turn,), stop=StopReason.DONE
    )
    return Group(group_id=task, env="toy", task_seed=task, trajectories=(trajectory,))


def write_run(folder: Path, by_step: dict[int, list[Group]]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    for step, groups in by_step.items():
        file = folder / "rollouts" / f"step_{step:06d}.parquet"
        write_groups(file, groups, step=step, kept=[True] * len(groups))
    return folder


def test_first_middle_and_last_common_steps_are_shown(tmp_path):
    def run(name: str, steps: list[int]) -> Path:
        by_step = {step: [group(step, f"board {step}", f"{name} {step}")] for step in steps}
        return write_run(tmp_path / name, by_step)

    found = shared_replies([run("a", [1, 10, 20, 30]), run("b", [1, 10, 20])])
    assert found == [
        TaskReplies(1, "board 1", ("a 1", "b 1")),
        TaskReplies(10, "board 10", ("a 10", "b 10")),
        TaskReplies(20, "board 20", ("a 20", "b 20")),
    ]


def test_only_tasks_that_all_runs_met_are_shown_without_the_lines_they_share(tmp_path):
    end = "\nReply in tags."
    one = [group(task, f"#{task}_#{end}", f"a{task}") for task in (5, 6, 7)]
    other = [group(task, f"#{task}_#{end}", f"b{task}") for task in (7, 6)]
    runs = [write_run(tmp_path / "a", {1: one}), write_run(tmp_path / "b", {1: other})]
    assert shared_replies(runs) == [
        TaskReplies(1, "#6_#", ("a6", "b6")),
        TaskReplies(1, "#7_#", ("a7", "b7")),
    ]


def test_runs_without_a_common_step_or_task_are_told_what_to_give(tmp_path):
    a = write_run(tmp_path / "a", {1: [group(1, "x", "y")]})
    b = write_run(tmp_path / "b", {1: [group(2, "x", "y")]})
    c = write_run(tmp_path / "c", {})
    with pytest.raises(MooredError, match="same seed"):
        shared_replies([a, b])
    with pytest.raises(MooredError, match="rollouts_every"):
        shared_replies([a, c])
