"""An evaluation, counted by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from moored.cli import eval as command
from moored.cli.eval import _summary
from moored.config import load_config
from moored.diagnostics.resampling import wilson_interval
from moored.evaluate import Evaluation, summarize
from moored.types import Group, StopReason, Trajectory


def evaluation_of(tasks: Sequence[str], model: str = "nano") -> Evaluation:
    """Each task is a word: w for an episode that was won, f for a failure, e for an error."""
    groups = [
        Group(
            group_id=place,
            env="toy",
            task_seed=place,
            trajectories=tuple(
                Trajectory(
                    env="toy",
                    task_seed=place,
                    episode_seed=episode,
                    turns=(),
                    stop=StopReason.ENV_ERROR if end == "e" else StopReason.DONE,
                    success=end == "w",
                )
                for episode, end in enumerate(ends)
            ),
        )
        for place, ends in enumerate(tasks)
    ]
    chosen = {"num_samples": len(tasks[0]), "temperature": 1.0, "split": "test"}
    return summarize(groups, load_config({"model": model, "evaluation": chosen, "seed": 5}))


def test_an_episode_that_ended_in_an_error_is_neither_success_nor_failure():
    found = evaluation_of(["w", "f", "e", "w"])
    assert found.success_rate == pytest.approx(2 / 3) and found.num_errors == 1
    assert found.interval == wilson_interval(2, 3)
    assert found.metrics()["evaluation/error_count"] == 1.0
    assert "1 of 4 episodes ended in an error" in _summary(found)
    assert "error" not in _summary(evaluation_of(["w", "f"]))


def test_pass_at_k_is_of_the_tasks_that_were_played_so_often():
    found = evaluation_of(["wf", "fe", "ee", "ww"])
    assert found.success_rate == pytest.approx(3 / 5)
    assert found.interval == wilson_interval(3 / 5 * 3, 3)  # tasks with an episode that counts
    assert found.pass_at == {1: pytest.approx((1 / 2 + 0 + 1) / 3), 2: 1.0}


def test_errors_alone_measure_nothing():
    found = evaluation_of(["e", "e"], model="mini")
    assert math.isnan(found.success_rate) and math.isnan(found.interval[0]) and not found.pass_at
    assert "not measured" in _summary(found) and "nan" not in _summary(found)


def test_what_an_evaluation_depends_on_is_named():
    said = _summary(evaluation_of(["w", "f"], model="out/model"))
    assert "out/model" in said and "temperature 1," in said
    assert "test tasks 0 to 1" in said and "seed 5" in said


def test_what_commands_a_terminal_is_printed_as_an_escape(monkeypatch, capsys):
    found = evaluation_of(["w"], model="\x1b[2Jmodel")
    monkeypatch.setattr(command, "evaluate_source", lambda *_: found)
    command.eval_command("model")
    assert r"\x1b[2Jmodel" in capsys.readouterr().out
