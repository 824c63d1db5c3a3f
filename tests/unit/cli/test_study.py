"""`moored study` without running anything: lists, plans, refusals, analyses."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from moored.analysis.curves import read_curve_file
from moored.analysis.study_table import Mean, Row, RunResult, StudyTable
from moored.cli import study as study_command
from moored.cli.main import main
from moored.cli.study import StudyProgress, show_table
from moored.config import dump_config
from moored.runlog.log import RunLog
from moored.studies.declaration import plan_runs, read_study, restricted, study_names
from moored.studies.folder import StudyFolder
from tests.warm import run_warm

ROOT = Path(__file__).parents[3]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `moored study …` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moored", "study", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run


def test_without_a_name_the_studies_are_listed_with_their_questions(command):
    code, out, _ = command()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:-2]] == study_names()
    assert all(line.endswith("?") for line in out.splitlines()[:-2])


def test_the_plan_tells_runs_and_time_and_makes_nothing(command, tmp_path):
    code, out, _ = command("bottle", "--plan", "--seeds", "4-6", "--jobs", "3", "num_steps=10")
    assert code == 0
    assert "36 runs: 12 arms x 3 seeds (4, 5, 6)\n" in out
    assert "folder: runs/bottle; 3 at a time (as given)\n" in out
    assert "collapse stop.min_success=0 filter.rule=none num_steps=10" in out
    assert "\nabout " in out and "measured with the study's own options" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["botle"], "unknown study 'botle'; did you mean 'bottle'? (or give a .yaml file)"),
        (["bottle", "filter.vale=1"], "unknown option 'filter.vale'; did you mean 'value'?"),
        (["bottle", "seed=1"], "--seeds"),
        (["bottle", "grpo"], "got 'grpo'; presets"),
        (["bottle", "--only", "filter=nine"], "no arm 'nine'"),
        (["bottle", "--only", "tsk=nine"], "no factor is called 'tsk'"),
        (["bottle", "--seeds", "x"], "a count (5), a range (4-8) or a list (1,3), got 'x'"),
        (["bottle", "--jobs", "x"], "got 'x'"),
        (["bottle", "model=nan"], "arm 'grpo none' cannot run: model 'nan' is neither embedded n"),
        (["bottle", "env.0.options.max_turn=1"], "arm 'grpo none' cannot run: "),
        (["correlation"], "none of runs/bottle, runs/bottle_mini, runs/main_table, "),
        (["correlation", "gone"], "'gone' holds no run"),
        (["bottle", "--curves", "."], "got '.'"),
        (["bottle", "--curves", "gone/x.json"], "got 'gone/x.json'"),
        (["correlation", "--plan"], "runs nothing itself"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(command, tmp_path, words, message):
    code, out, said = command(*words)
    assert (code, out) == (2, "")
    assert said.startswith("moored: ") and message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_correlation_reads_all_runs_of_the_folders_and_names_those_it_leaves_out(command, tmp_path):
    for number in range(6):
        log = RunLog(tmp_path / "mine" / "arm" / f"seed-{number}")
        log.write_config("seed: 0\n")
        metrics = {"rollout/success_rate": number / 10, "rollout/validity_rate": 1 - number / 10}
        log.append("metrics", 1, metrics)
    RunLog(tmp_path / "mine" / "arm" / "empty").write_config("seed: 0\n")
    code, out, _ = command("correlation", "mine", "--out", "found")
    assert code == 0
    assert "left out: mine/arm/empty: 'mine/arm/empty' has no finished step\n" in out
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    (validity,) = found["correlations"]
    assert validity["num_settings"] == 1 and "draw runs inside their settings" in out
    assert validity["name"] == "validity"
    assert validity["spearman"]["value"] == pytest.approx(-1.0)
    assert len(found["runs"]) == 6
    assert "| validity | -1.00 [-1.00, -1.00] |" in (tmp_path / "found" / "results.md").read_text()


def test_a_finished_study_becomes_a_curve_file_that_correlation_reads(command, tmp_path):
    study = restricted(read_study("bottle"), ["algorithm=grpo", "filter=none,top_p"])
    runs = plan_runs(study)
    folder = StudyFolder(tmp_path / "runs" / "bottle", study)
    for number, run in enumerate(runs):
        log = RunLog(folder.run_folder(run))
        log.write_config(dump_config(run.config))
        for step in (1, 2):
            metrics = {"rollout/success_rate": number / 10, "rollout/validity_rate": step - number}
            log.append("metrics", step, metrics)
        folder.note_end(run, 1 if number == 8 else 0, 1.0)
    folder.write_study(study, [])
    folder.close()
    words = ["bottle", "--only", "algorithm=grpo", "--only", "filter=none,top_p", "--seeds", "3"]
    code, out, said = command(*words, "--curves", "curves.json")
    assert code == 0, said
    assert "curves: curves.json\n" in out
    stored = read_curve_file(tmp_path / "curves.json")
    assert {arm: [run.seed for run in of_arm] for arm, of_arm in stored.items()} == {
        "none": [0, 1, 2],
        "top_p": [0, 1, 2],
    }
    assert stored["top_p"][1].curves["success"] == [(1, 0.6), (2, 0.6)]
    code, _, said = command("correlation", "curves.json")
    assert code == 0, said
    found = json.loads((tmp_path / "runs" / "correlation" / "results.json").read_text())
    assert found["runs"][3] == "curves/top_p/seed-0"
    assert found["correlations"][0]["num_settings"] == 2


def test_without_torch_a_study_is_refused_before_its_first_run(command, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    code, _, said = command("bottle")
    assert code == 2
    assert said.startswith("moored: running a study needs packages that are not installed (torch)")
    assert not list(tmp_path.iterdir())


def test_planning_imports_no_torch():
    code = (
        "import sys; sys.argv = ['moored', 'study', 'main_table', '--plan']\n"
        "from moored.cli.main import main\n"
        "try: main()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    result = run_warm([], code=code, slim=True)
    assert result.stdout.endswith("\nFalse\n"), result.stderr


def test_on_a_small_terminal_the_live_table_has_only_the_arms_under_way(tmp_path):
    study = read_study("main_table")
    runs = plan_runs(study)
    folder = StudyFolder(tmp_path / "a", study)
    RunLog(folder.run_folder(runs[4])).append("metrics", 7, {"rollout/success_rate": 0.25})
    for height, num_rows in ((24, 1), (60, 32)):
        environ = {"TERM": "xterm"}  # a dumb terminal shows no live table
        console = Console(
            force_terminal=True, width=120, height=height, record=True, _environ=environ
        )
        progress = StudyProgress(console, folder, runs)
        with progress:
            progress.on_poll([runs[4]])
        shown = {" ".join(line.split()) for line in console.export_text().splitlines()}
        assert "0 of 96 runs finished" in shown
        assert "ppo sokoban top_p 0 of 3 seed 1: step 7 of 50, success 0.25" in shown
        assert sum(" 0 of 3" in line for line in shown) == num_rows


def test_a_table_that_is_too_wide_for_the_terminal_keeps_its_numbers(capsys):
    study = read_study("filters")
    figures = {
        name: Mean(mean=0.111 * k, half_width=0.011 * k, by_seed={})
        for k, name in enumerate(study.report, start=1)
    }
    run = RunResult(
        **{"path": Path("a"), "seed": 0, "last_step": 9, "num_averaged": 4, "figures": {}},
        **{"verdict": "cannot tell", "alarm_step": None, "has_collapsed": True},
    )
    row = Row(arms=("lowest_half",), runs=(run,) * 5, figures=figures, differences={})
    table = StudyTable(
        factors=("filter",), figures=study.report, rows=(row,), against=None, left_out={}
    )
    for width in (40, 80, 160):
        show_table(Console(width=width), study, table)
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert all(f"{0.111 * k:.3f} ± {0.011 * k:.3f}" in shown for k in range(1, 10))
        assert "5 of 5 [0.57, 1.00]" in shown
        assert shown.count("lowest_half") == shown.count("filter")
        lines = [line for line in shown.splitlines() if "Means" not in line and "MI of" not in line]
        assert max(map(len, lines)) <= width
        assert width < 160 or {"outcome-free", "well-formed"} & set(shown.split())


def test_correlations_keep_their_intervals_in_eighty_columns(command, monkeypatch):
    files = sorted(map(str, (ROOT / "benchmarks" / "results").glob("curves_*.json")))
    monkeypatch.setattr(study_command, "make_console", lambda: Console(width=80))
    code, out, _ = command("correlation", *files)
    assert code == 0 and "…" not in out
    assert len(re.findall(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]", out)) > 100
