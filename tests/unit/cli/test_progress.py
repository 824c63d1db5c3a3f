"""What a run prints, on a terminal of any width and in a pipe."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")

from moored.cli.progress import StepProgress, duration_text, seconds_left, steps_line
from moored.config import load_config
from moored.diagnostics import CollapseWatch, information
from moored.diagnostics.look import EnvironmentLook, Measurement
from moored.diagnostics.report import Verdict
from moored.diagnostics.watch import Watched
from moored.train import StepRecord

METRICS = {
    "rollout/success_rate": 0.25,
    "rollout/reward_mean": -1.5,
    "rollout/validity_rate": 1.0,
    "filter/kept_fraction": 0.5,
}


def record(step: int, **seconds: float) -> StepRecord:
    return StepRecord(step=step, metrics=METRICS, collapse=None, evaluation=None, seconds=seconds)


def test_the_time_left_counts_looks_and_evaluations_as_often_as_they_come():
    options = ["num_steps=13", "collapse.every=5", "evaluation.every=4"]
    first = record(1, rollout=90.0, update=9.0, collapse=6.0, evaluation=50.0)
    steps = [first, record(2, rollout=2.0, update=1.0), record(3, rollout=4.0, update=1.0)]
    # 10 steps of (3 + 5) / 2 s, looks after steps 5 and 10, evaluations after 4, 8, 12 and 13.
    assert seconds_left(steps, load_config(None, options)) == 10 * 4 + 2 * 6 + 4 * 50
    off = load_config(None, ["num_steps=13", "collapse.every=0"])
    assert seconds_left(steps, off) == 40


def test_the_time_left_counts_a_rollout_beside_the_update_once_and_gradients_when_due():
    options = ["num_steps=13", "collapse.every=0", "gradients.every=6"]
    steps = [record(1, update=9.0, gradients=7.0)]
    steps += [record(step, rollout=1.0, update=3.0, rollout_beside=3.0) for step in (2, 3)]
    # Gradients after steps 6 and 12.
    assert seconds_left(steps, load_config(None, options)) == 10 * 4 + 2 * 7


def test_the_header_says_which_steps_are_left():
    assert steps_line(1, 400) == "steps: 400"
    assert steps_line(201, 400) == "steps: 201 to 400, going on with the run"
    assert steps_line(401, 400) == "steps: all 400 are done; add num_steps=800 to go on to step 800"
    assert steps_line(2, 1) == "steps: the only one is done; add num_steps=2 to go on to step 2"


def test_durations_are_short():
    found = [duration_text(s) for s in (12.4, 89, 91, 45 * 60, 99 * 60, 125 * 60)]
    assert found == ["12 s", "89 s", "2 min", "45 min", "99 min", "2 h 05 min"]


def test_a_pipe_gets_one_line_for_each_step_and_the_time_left_once():
    file = io.StringIO()
    config = load_config(None, ["num_steps=103", "collapse.every=0"])
    with StepProgress(Console(file=file, width=160, soft_wrap=True), config, 0) as progress:
        for step in range(1, 6):
            progress.show(record(step, rollout=2.0, update=1.0))
    lines = file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("step ")] == [
        f"step {step}" for step in range(1, 6)
    ]
    assert lines[3] == "about 5 min left until step 103"
    assert len(lines) == 6


def test_a_step_says_how_many_episodes_it_lost_where_there_were_any():
    file = io.StringIO()
    with StepProgress(Console(file=file, width=160, soft_wrap=True), load_config(), 0) as progress:
        progress.show(replace(record(1), metrics=METRICS | {"rollout/error_count": 0.0}))
        lost = {"rollout/error_count": 2.0, "evaluation/error_count": 3.0}
        progress.show(replace(record(2), metrics=METRICS | lost))
    first, second = file.getvalue().splitlines()[:2]
    assert "lost" not in first and "5 episodes lost" in second


@pytest.mark.parametrize("width", [30, 60, 200])
def test_no_line_is_wider_than_the_terminal(width):
    file = io.StringIO()
    console = Console(file=file, width=width, height=20, force_terminal=True, color_system=None)
    config = load_config(None, ["num_steps=400", "collapse.every=0"])
    with StepProgress(console, config, 0) as progress:
        for step in range(1, 5):
            progress.show(record(step, rollout=2.0, update=1.0))
    frames = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).replace("\r", "\n").split("\n")
    assert max(map(len, frames)) <= width
    assert any(frame.startswith("step   4/400 ") for frame in frames)


def test_where_no_reply_holds_a_reasoning_one_sentence_says_so():
    looks = {"x": EnvironmentLook(view=None, watched=None, share_unmeasured=1.0)}
    skipped = {"first_turn": "needs 2 prompts", "trajectory": "needs 2 prompts"}
    look = Measurement(step=1, metrics={}, reports={}, skipped=skipped, environments=looks)
    console = Console(file=io.StringIO(), width=400)
    StepProgress(console, load_config(), 0).show(replace(record(1), collapse=look))
    text = cast(io.StringIO, console.file).getvalue()
    assert "collapse not measured: no reply holds a valid reasoning" in text
    assert "needs 2 prompts" not in text


def tiny_minus(watched: Watched) -> Watched:
    return replace(watched, report=replace(watched.report, mi_estimate=-1e-5))


def test_a_run_has_collapsed_when_its_last_look_says_so():
    progress = StepProgress(Console(file=io.StringIO()), load_config(), 0)
    report = information(np.eye(4) - 2.0, np.arange(4), np.ones(4))
    states = []
    for step, verdict in enumerate(("collapsed", "healthy", None, "collapsed", None), start=1):
        look = None
        if verdict is not None:
            judged = replace(CollapseWatch().update(1, report), verdict=Verdict(verdict))
            looks = {"bandit": EnvironmentLook(view="x", watched=judged, share_unmeasured=0.0)}
            look = Measurement(step=step, metrics={}, reports={}, skipped={}, environments=looks)
        progress.show(replace(record(step), collapse=look))
        states.append(progress.has_collapsed)
    assert states == [True, False, False, True, True]


def test_a_look_is_told_for_each_environment_by_name_where_there_are_several():
    logp, columns = np.full((8, 4), -9.0), np.arange(8) % 4
    logp[np.arange(8), columns] = -1.0
    report = information(logp, columns, np.full(8, 2), permutations=99)
    watched = CollapseWatch().update(1, report)

    def shown(*names: str, watched: Watched = watched) -> str:
        looks = {
            name: EnvironmentLook(view=name, watched=watched, share_unmeasured=0.0)
            for name in names
        }
        look = Measurement(
            step=1, metrics={}, reports={}, skipped={"x/chain": "too few"}, environments=looks
        )
        console = Console(file=io.StringIO(), width=400)
        progress = StepProgress(console, load_config(), 0)
        progress.show(replace(record(1), collapse=look))
        return cast(io.StringIO, console.file).getvalue()

    one, two = shown("sokoban"), shown("sokoban", "bandit")
    judged = "retrieval 1.00 (chance 0.25)"
    assert one.count(judged) == 1 and "sokoban" not in one
    assert f"sokoban: {judged}" in two and f"bandit: {judged}" in two
    assert str(watched.verdict).replace("_", " ") in one
    assert "x/chain not measured: too few" in one
    assert "MI -0.000" not in shown("sokoban", watched=tiny_minus(watched))
    empty = replace(watched, has_nothing_to_lose=True)
    assert "nothing to lose" in shown("sokoban", watched=empty) and "nothing" not in one
