"""Curve files: what is stored of a run, and what comes back."""

from __future__ import annotations

import json

import pytest

from moored.analysis.curve_files import (
    StoredRun,
    look_curve,
    read_curve_file,
    read_run_curves,
    up_to_shortest,
    write_curve_file,
)
from moored.errors import ConfigError, MooredError
from moored.runlog.log import RunLog


def run(seed: int, num_steps: int, **curves: list[tuple[int, float]]) -> StoredRun:
    success = [(step, 0.5) for step in range(1, num_steps + 1)]
    return StoredRun(seed=seed, alarm_step=3, curves={"success": success, **curves})


def test_the_curves_of_a_run_directory_come_back_from_the_file(tmp_path):
    log = RunLog(tmp_path / "run")
    for step in (1, 2):
        log.append("metrics", step, {"rollout/success_rate": step / 3, "filter/kept_fraction": 1})
    view = "collapse_first_turn_sample"
    look = {f"{view}/mi_estimate": 0.25, f"{view}/mi_estimate_se": 0.1, "alarm": {"step": 2}}
    log.append("collapse", 2, look)
    stored = read_run_curves(tmp_path / "run", 7)
    file = tmp_path / "curves.json"
    write_curve_file(file, {"none": [stored]}, {"command": ["moored"]})
    (found,) = read_curve_file(file)["none"]
    assert (found.seed, found.alarm_step, found.last_step) == (7, 2, 2)
    assert dict(found.curves) == {
        "success": [(1, 0.333333), (2, 0.666667)],
        "kept": [(1, 1.0), (2, 1.0)],
        "MI": [(2, 0.25)],
        "MI, error": [(2, 0.1)],
    }
    assert json.loads(file.read_text())["command"] == ["moored"]


def test_a_look_is_followed_in_observation_swap_where_that_was_measured():
    assert look_curve("MI, error", "swap") == "MI, swap, error"
    both = run(0, 5, **{"MI": [(5, 0.9)], "MI, swap": [(5, 0.2)], "MI, swap, error": [(5, 0.1)]})
    assert both.followed("MI") == [(5, 0.2)]
    assert both.followed("MI, error") == [(5, 0.1)]
    single = run(0, 5, **{"MI": [(5, 0.9)], "MI, swap": []})
    assert single.followed("MI") == [(5, 0.9)]


def test_runs_are_cut_to_the_shortest_with_alarms_after_it_forgotten():
    cut = up_to_shortest({"a": [run(0, 9)], "b": [run(1, 2)]})
    assert [found.last_step for arm in cut.values() for found in arm] == [2, 2]
    assert cut["a"][0].alarm_step is None


def text_of(curves: str, alarm_step: str = "null") -> str:
    return f'{{"runs": {{"a": [{{"seed": 0, "alarm_step": {alarm_step}, "curves": {curves}}}]}}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "no JSON",
        '{"runs": {}}',
        '{"runs": {"a": []}}',
        text_of("{}"),
        text_of('{"success": []}'),
        text_of('{"success": [[1, NaN]]}'),
        text_of('{"success": [[Infinity, 1]]}'),
        text_of('{"success": [[1, 0.5]]}', alarm_step='"soon"'),
    ],
)
def test_another_file_is_refused_with_what_writes_one(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a curve file .*moored study NAME --curves FILE"):
        read_curve_file(file)


def test_a_run_without_a_step_has_no_curves(tmp_path):
    RunLog(tmp_path / "run").write_config("seed: 0\n")
    with pytest.raises(MooredError, match="has no finished step"):
        read_run_curves(tmp_path / "run", 0)
