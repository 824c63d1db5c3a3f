"""Curves of runs, from run directories and from curve files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.analysis.run_curves import read_all, read_curves, read_stored
from moored.errors import ConfigError, MooredError
from moored.runlog.log import RunLog

STORED = Path(__file__).parents[3] / "benchmarks" / "results"


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
    with pytest.raises(MooredError, match="has no finished step"):
        read_curves(tmp_path / "empty")


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


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run; give the folder of a study or a curve"):
        read_all([tmp_path])
