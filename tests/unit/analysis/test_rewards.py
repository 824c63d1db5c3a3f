"""Rewards, groups and prompts from every kind of file, and words for the broken ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from moored.analysis.rewards import RewardGroups, read_rewards
from moored.errors import MooredError
from moored.files.records import ReadOptions

# Two prompts, two rollouts each, not in one piece.
ROWS = [
    {"prompt": "1+1?", "response": "<think>hm</think><answer>2</answer>", "reward": 1.0},
    {"prompt": "1+2?", "response": "<answer> 3</answer>", "reward": 0.5},
    {"prompt": "1+1?", "response": "<think>oh</think><answer>2</answer>", "reward": 0.0},
    {"prompt": "1+2?", "response": "<answer>4</answer>", "reward": 0.5},
]


def write_lines(file: Path, rows: list[dict], end: str = "\n") -> Path:
    file.write_text("\n".join(map(json.dumps, rows)) + end)
    return file


def renamed(**names: str) -> list[dict]:
    return [{names.get(key, key): value for key, value in row.items()} for row in ROWS]


def write_parquet(file: Path, rows: list[dict]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def assert_is_rows(batch: RewardGroups) -> None:
    assert batch.rewards.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert batch.group_of.tolist() == [0, 1, 0, 1]
    assert batch.prompts == ("1+1?", "1+2?")
    assert batch.behaviours is not None
    first, second, third, fourth = batch.behaviours.tolist()
    # The answer is what a trajectory does, whatever it thought before.
    assert first == third
    assert len({first, second, fourth}) == 3


def test_plain_json_lines(tmp_path):
    batch = read_rewards([write_lines(tmp_path / "a.jsonl", ROWS)])
    assert_is_rows(batch)
    assert batch.success is None
    assert batch.notes == ()


def test_trl_chat_messages_are_grouped_whole_and_shown_without_the_system(tmp_path):
    def row(system: str, reward: float) -> dict:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        reply = [{"role": "assistant", "content": f"<answer>{reward}</answer>"}]
        return {"step": 1, "prompt": messages, "completion": reply, "f": reward, "advantage": 0.0}

    rows = [row("Be kind.", 1.0), row("Be brief.", 0.0), row("Be kind.", 0.0)]
    batch = read_rewards([write_parquet(tmp_path / "c.parquet", rows)])
    assert batch.group_of.tolist() == [0, 1, 0]
    assert batch.prompts == ("Hello", "Hello")
    assert batch.behaviours is not None
    assert batch.behaviours[1] == batch.behaviours[2] != batch.behaviours[0]


def test_csv_with_group_and_reward(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("\ufeffgroup,reward,success\na,1,True\nb,,false\na,0,False\n", encoding="utf-8")
    batch = read_rewards([file])
    assert batch.group_of.tolist() == [0, 1, 0]
    np.testing.assert_equal(batch.rewards, [1, math.nan, 0])
    assert batch.success is not None
    assert batch.success.tolist() == [1, 0, 0]
    assert batch.behaviours is None
    assert batch.prompts == ("", "")


def test_own_rollouts_are_one_trajectory_an_episode(tmp_path):
    pytest.importorskip("pyarrow")
    from moored.runlog.rollouts import write_groups
    from moored.types import Group, Prompt, StopReason, Trajectory, Turn

    def turn(reply: str, reward: float, observation: str = "later") -> Turn:
        ids, logprobs = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.float32)
        return Turn(
            prompt=Prompt(ids),
            completion_ids=ids,
            logprobs=logprobs,
            reply=reply,
            reward=reward,
            seen=observation,
        )

    def episode(*turns: Turn, stop=StopReason.DONE, success=False) -> Trajectory:
        return Trajectory(
            env="toy", task_seed=5, episode_seed=0, turns=turns, stop=stop, success=success
        )

    first, other = turn("<answer>up</answer>", 0.25, "a maze"), turn("<answer>no</answer>", 0.0)
    episodes = (
        episode(first, turn("<answer>left</answer>", 0.5), success=True),
        episode(first, other),
        episode(first, stop=StopReason.ENV_ERROR),
        episode(first, turn("<think>.</think><answer>left</answer>", 0.5), success=True),
    )
    group = Group(group_id=9, env="toy", task_seed=5, trajectories=episodes)
    file = tmp_path / "step_000010.parquet"
    write_groups(file, [group], step=10, kept=[True])
    batch = read_rewards([file])
    np.testing.assert_equal(batch.rewards, [0.75, 0.25, math.nan, 0.75])
    assert batch.success is not None
    assert batch.success.tolist() == [1, 0, 0, 1]
    assert (batch.steps.tolist(), batch.prompts) == ([10], ("a maze",))
    assert batch.behaviours is not None
    assert batch.behaviours[0] == batch.behaviours[3] != batch.behaviours[1]


def test_rewards_of_own_rollouts_are_those_that_the_filter_of_the_run_scores(tmp_path):
    pytest.importorskip("pyarrow")
    from moored.runlog.rollouts import write_groups
    from moored.training.samples import filter_rewards
    from moored.types import Group, Prompt, StopReason, Trajectory, Turn

    def turn(reward: float, penalty: float = 0.0) -> Turn:
        return Turn(
            prompt=Prompt(np.zeros(2, dtype=np.int64)),
            completion_ids=np.zeros(1, dtype=np.int64),
            logprobs=np.zeros(1, dtype=np.float32),
            reply="",
            reward=reward,
            penalty=penalty,
            is_valid=penalty == 0.0,
        )

    def episode(*turns: Turn, stop=StopReason.DONE, success=False) -> Trajectory:
        return Trajectory(
            env="toy", task_seed=0, episode_seed=0, turns=turns, stop=stop, success=success
        )

    malformed = turn(-0.1, -0.1)
    failures = episode(turn(-0.2)), episode(turn(-0.2)), episode(malformed), episode(malformed)
    mixed = (
        episode(malformed, turn(1.0), success=True),
        episode(turn(-0.3)),
        episode(malformed, stop=StopReason.ENV_ERROR),
        episode(stop=StopReason.CONTEXT_LIMIT),
    )
    groups = [
        Group(group_id=k, env="toy", task_seed=0, trajectories=members)
        for k, members in enumerate((failures, mixed))
    ]
    file = tmp_path / "step_000001.parquet"
    write_groups(file, groups, step=1, kept=[True, True])
    batch = read_rewards([file])
    # A malformed reply does not make a group of failures vary: it counts as the worst of them.
    np.testing.assert_equal(batch.rewards, [-0.2] * 4 + [1.0, -0.3, math.nan, 0.0])
    np.testing.assert_equal(
        batch.rewards, np.concatenate([filter_rewards(group, "task") for group in groups])
    )
    assert "--reward trajectory_reward takes all that was earned" in batch.notes[-1]
    total = read_rewards([file], ReadOptions(rewards={"trajectory_reward": 1.0}))
    np.testing.assert_equal(total.rewards, [-0.2, -0.2, -0.1, -0.1, 0.9, -0.3, math.nan, 0.0])
    assert total.notes == ("1 of 8 rewards are missing and take no part",)
    # Advantages are of what was earned, which the outcome-free share goes by.
    np.testing.assert_equal(batch.earned, total.rewards)
    np.testing.assert_equal(batch.at_step(1).earned, total.rewards)
    assert total.earned is None


def test_groups_of_different_files_and_steps_are_different(tmp_path):
    rows = [{"group": 0, "reward": r} for r in (0, 1)]
    one, two = (write_lines(tmp_path / name, rows) for name in ("1.jsonl", "2.jsonl"))
    batch = read_rewards([one, two])
    assert batch.group_of.tolist() == [0, 0, 1, 1]
    assert batch.steps.tolist() == [1, 2]
    steps = write_lines(tmp_path / "s.jsonl", [{**rows[0], "step": s} for s in (4, 6, 4)])
    assert read_rewards([steps]).group_of.tolist() == [0, 1, 0]


def test_one_step_can_be_taken_out(tmp_path):
    rows = [{"group": g, "step": s, "reward": g + s} for s in (4, 6) for g in (0, 1, 0)]
    batch = read_rewards([write_lines(tmp_path / "a.jsonl", rows)])
    later = batch.at_step(6)
    assert later.rewards.tolist() == [6, 7, 6]
    assert later.group_of.tolist() == [0, 1, 0]
    with pytest.raises(MooredError, match="no step 5; there are 2 steps from 4 to 6"):
        batch.at_step(5)


def test_rewards_that_were_float32_keep_its_rounding(tmp_path):
    summed = float(np.sum(np.full(10, -0.1, dtype=np.float32)))
    rows = [{"group": 0, "reward": r} for r in (-1.0, summed)]
    assert read_rewards([write_lines(tmp_path / "a.jsonl", rows)]).rewards.dtype == np.float32
    rows[0]["reward"] = 0.1
    assert read_rewards([write_lines(tmp_path / "b.jsonl", rows)]).rewards.dtype == np.float64


def test_a_last_line_that_was_cut_is_left_out_and_said(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", ROWS, end='\n{"prompt": "1+')
    batch = read_rewards([file])
    assert_is_rows(batch)
    assert "line 5" in batch.notes[0] and "cut short" in batch.notes[0]


def test_progress_is_told_in_trajectories(tmp_path):
    told: list[int] = []
    rows = [{"group": i // 8, "reward": i % 2} for i in range(2100)]
    read_rewards([write_lines(tmp_path / "a.jsonl", rows)], on_rows=told.append)
    assert told == [1024, 2048]


def test_bad_rows_are_counted_when_they_may_be_skipped(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [*ROWS, {"prompt": "1+1?"}])
    with pytest.raises(MooredError, match=r"line 5 has no 'reward'.*--skip-bad"):
        read_rewards([file])
    batch = read_rewards([file], skip_bad=True)
    assert_is_rows(batch)
    assert batch.notes == ("1 rows cannot be used and are left out",)


def test_example_prompts_are_kept_from_where_those_of_their_environment_differ(tmp_path):
    rows = [
        {"prompt": f"{env} " * 400 + f"level {k}", "env": env, "reward": k}
        for env in ("maze", "sums")
        for k in (0, 1)
    ]
    batch = read_rewards([write_lines(tmp_path / "a.jsonl", rows)])
    assert [prompt.split()[-2:] for prompt in batch.prompts] == [["level", "0"], ["level", "1"]] * 2
    assert all(len(prompt) < 200 for prompt in batch.prompts)


def test_missing_rewards_are_counted_and_none_at_all_is_refused(tmp_path):
    rows = [{"prompt": "p", "reward": reward} for reward in (1.0, math.nan, None)]
    batch = read_rewards([write_lines(tmp_path / "a.jsonl", rows)])
    assert batch.notes == ("2 of 3 rewards are missing and take no part",)
    with pytest.raises(MooredError, match="none of the 2"):
        read_rewards([write_lines(tmp_path / "b.jsonl", rows[1:])])
