"""Curves of runs, from run directories and from curve files, and what such a file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.analysis.curves import (
    StoredRun,
    look_curve,
    read_all,
    read_curve_file,
    read_curves,
    read_run_curves,
    read_stored,
    write_curve_file,
)
from moored.errors import ConfigError, MooredError
from moored.runlog.log import RunLog

STORED = Path(__file__).parents[3] / "benchmarks" / "results"


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


def text_of(curves: str) -> str:
    return f'{{"runs": {{"a": [{{"seed": 0, "alarm_step": null, "curves": {curves}}}]}}}}'


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        '{"runs": {}}',
        '{"runs": {"a": []}}',
        text_of("{}"),
        text_of('{"success": []}'),
        text_of('{"success": [[1, NaN]]}'),
    ],
)
def test_another_file_is_refused_with_what_writes_one(tmp_path, text):
    (file := tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="--curves FILE"):
        read_curve_file(file)


def test_diagnostics_are_read_in_the_view_that_the_verdict_rests_on(tmp_path):
    log = RunLog(tmp_path / "run")
    log.append("metrics", 1, {"rollout/success_rate": 0.5, "learner/entropy": 0.7})
    reports = {"swap": {"mi_estimate": 0.2}, "first": {"mi_estimate": 0.9}}
    look = {"environments": {"sokoban": {"view": "swap"}}, "reports": reports}
    log.append("collapse", 1, look)
    run = read_curves(tmp_path / "run")
    assert run.final("MI") == 0.2
    assert (run.final("token entropy"), run.final("validity")) == (0.7, None)
    RunLog(tmp_path / "empty").write_config("seed: 0\n")
    for read in (read_curves, lambda path: read_run_curves(path, 0)):
        with pytest.raises(MooredError, match="has no finished step"):
            read(tmp_path / "empty")


def test_run_directories_that_differ_in_their_seed_only_are_one_setting(tmp_path):
    texts = {
        "a": "seed: 0\nfilter: {rule: none}\n",
        "b": "seed: 1\nfilter: {rule: none}\n",
        "c": "seed: 1\nfilter: {rule: top_k, largest: false}\n",
    }
    for name, text in texts.items():
        log = RunLog(tmp_path / name)
        log.write_config(text)
        log.append("metrics", 1, {"rollout/success_rate": 0.5})
    runs, left_out = read_all([tmp_path])
    assert runs[0].setting == runs[1].setting != runs[2].setting
    assert [run.arm for run in runs] == ["none", "none", "top_k_smallest"]
    assert not left_out


def stored(path: Path, success: list[float], **curves: list[list[float]]) -> Path:
    steps = [[step, value] for step, value in enumerate(success, start=1)]
    run = {"seed": 4, "alarm_step": None, "curves": {"success": steps, **curves}}
    path.write_text(json.dumps({"runs": {"none": [run]}}))
    return path


def test_a_run_that_was_made_twice_counts_once_as_the_longer(tmp_path):
    short = stored(tmp_path / "short.json", [0.1, 0.2])
    long = stored(tmp_path / "long.json", [0.1, 0.2, 0.3])
    other = stored(tmp_path / "other.json", [0.1, 0.25, 0.3])
    zeros = [stored(tmp_path / f"zeros{k}.json", [0.0, 0.0]) for k in range(2)]
    runs, left_out = read_all([short, long, other, *zeros])
    names = ["long", "other", "zeros0", "zeros1"]
    assert [run.name for run in runs] == [f"{name}/none/seed-4" for name in names]
    assert left_out == {"short/none/seed-4": "the same run as long/none/seed-4, up to step 2"}


def test_the_entropy_of_reasoning_is_its_mi_plus_what_the_prompt_leaves(tmp_path):
    curves = {"MI": [[1, 0.25]], "H(Z|X)": [[1, 0.5]], "retrieval": [[1, 0.125]]}
    (run,) = read_stored(stored(tmp_path / "a.json", [0.1, 0.2], **curves))
    assert run.final("H(Z)") == 0.75
    assert run.setting == "a/none"


def test_the_stored_curves_are_207_different_runs_in_54_settings():
    files = [*sorted(STORED.glob("bottle_*.json")), *sorted(STORED.glob("curves_*.json"))]
    runs, left_out = read_all(files)
    assert (len(runs), len(left_out)) == (207, 16)
    assert len({run.setting for run in runs}) == 54
    repeated = ("bottle_cpu_every_step/", "curves_filters/none/", "curves_filters/top_p/")
    assert all(name.startswith(repeated) for name in left_out)


def test_runs_of_a_curve_file_with_several_factors_belong_to_the_arm_of_the_last_one(tmp_path):
    run = {"seed": 4, "alarm_step": None, "curves": {"success": [[1, 0.5]]}}
    file = tmp_path / "slip.json"
    file.write_text(json.dumps({"runs": {"20/none": [run], "20/top_p": [run], "80/none": [run]}}))
    runs = read_stored(file)
    assert [run.arm for run in runs] == ["none", "top_p", "none"]
    assert len({run.setting for run in runs}) == 3
