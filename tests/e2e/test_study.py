"""Studies with real processes: killed, stopped, refused, with runs that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moored.runlog.log import read_records
from moored.studies.declaration import PlannedRun, plan_runs, read_study, study_names
from moored.train import build_run, start, train
from tests.e2e.forked_runs import START
from tests.warm import WarmProcess

ROOT = Path(__file__).parent.parent.parent
ENTRY = "from moored.cli.main import main; main()"
TINY = """
question: Does a study survive?
base: [smoke, model={model}, "env=tests.e2e.toys:Echo", rollout.group_size=2,
       rollout.max_response_tokens=2, evaluation.every=0, collapse.every=2, stop.low_variance=0,
       num_steps={num_steps}]
factors:
  filter:
    none: [filter.rule=none]
    all: [filter.keep_zero=true, filter.value=1.0]
against: {{filter: none}}
seeds: 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def declare(folder, toy_folder) -> Callable[[int], str]:
    """Writes `tiny.yaml`, a study of 2 arms x 2 seeds with runs of so many steps."""

    def write(num_steps: int) -> str:
        text = TINY.format(num_steps=num_steps, model=toy_folder)
        (folder / "tiny.yaml").write_text(text)
        return text

    return write


def launch(*words: str) -> WarmProcess:
    """`moored study words…`, quickly: it and its runs are forks."""
    return WarmProcess(["study", *words], code=START, env={"PYTHONPATH": str(ROOT)})


def launch_anew(*words: str) -> subprocess.Popen[str]:
    """The same as a new process, which starts new processes."""
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, "study", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def finish(process: WarmProcess | subprocess.Popen[str], expect: int = 0) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == expect, out + err
    return out, err


def wait_until(process: WarmProcess, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def num_steps(study: Path) -> int:
    """Steps that the runs of a study have done, all together."""
    return sum(file.read_bytes().count(b"\n") for file in study.glob("*/*/metrics.jsonl"))


def kill(process: WarmProcess, *, with_runs: bool) -> None:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.kill()
    for child in children if with_runs else []:
        os.kill(int(child), signal.SIGKILL)
    process.communicate()


def same_files(run: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "collapse.jsonl", "config.yaml", "model/model.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), f"{run}: {name}"


def train_here(run: PlannedRun, folder: Path) -> Path:
    """The same run in this process, without a study."""
    torch.set_num_threads(1)
    made = build_run(run.config, folder / run.name)
    start(made)
    train(made)
    made.close()
    return folder / run.name


@pytest.mark.skipif(sys.platform != "linux", reason="reads the children of a process from /proc")
def test_a_study_killed_three_times_ends_with_the_same_files_as_one_that_was_not(folder, declare):
    declare(12)
    study = folder / "runs" / "tiny"
    # Study and runs at once; the study alone, whose runs then save and stop; both again.
    for steps, with_runs in ((3, True), (12, False), (24, True)):
        process = launch("tiny.yaml", "--jobs", "2")
        wait_until(process, lambda steps=steps: num_steps(study) >= steps)
        kill(process, with_runs=with_runs)
    out, _ = finish(launch("tiny.yaml", "--jobs", "2"))
    assert "[4/4] " in out and " failed" not in out
    runs = plan_runs(read_study("tiny.yaml"))
    assert [run.name for run in runs] == [
        f"{arm}/seed-{seed}" for arm in ("none", "all") for seed in (0, 1)
    ]
    for run in runs:
        same_files(study / run.name, train_here(run, folder / "whole"))
    table = json.loads((study / "results.json").read_text())
    assert [len(row["runs"]) for row in table["rows"]] == [2, 2]
    assert out.endswith("report: runs/tiny/report.html\n")
    assert not list(study.glob("*/*/report.html"))
    # Nothing is left to do, and the table is there again.
    out, _ = finish(launch("tiny.yaml"))
    assert "4 runs, 4 of them finished" in out and "started" not in out


def test_sigterm_saves_the_runs_says_how_to_go_on_and_a_second_process_is_refused(folder, declare):
    declare(5000)
    study = folder / "runs" / "tiny"
    first = launch("tiny.yaml", "--jobs", "1")
    wait_until(first, lambda: num_steps(study) >= 2)
    _, said = finish(launch("tiny.yaml"), expect=2)
    assert said.startswith(f"moored: another process (pid {first.pid} on ")
    assert said.count("\n") == 1
    first.send_signal(signal.SIGTERM)
    out, _ = finish(first, expect=143)
    assert out.endswith("go on with: moored study tiny.yaml --seeds 0,1 --jobs 1\n")
    assert "[0/4] none/seed-0 stopped\n" in out
    run = study / "none" / "seed-0"
    last = read_records(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{last:06d}").is_dir()
    assert not (study / "all").exists()


def test_a_run_that_fails_is_listed_with_its_log_and_the_others_go_on(folder, declare):
    (folder / "mine.py").write_text(
        "def engine(config, *, trains):\n    raise SystemExit('no power')\n"
    )
    text = declare(1).replace("[filter.rule=none]", "[engine.kind=mine:engine]")
    # The toy's module imports torch, which takes its time in every new process.
    (folder / "tiny.yaml").write_text(text.replace("tests.e2e.toys:Echo", "bandit"))
    out, said = finish(launch_anew("tiny.yaml", "--seeds", "1"), expect=1)
    log = Path("runs", "tiny", "none", "seed-0.log")
    assert f"1 of 2 runs failed:\n  none/seed-0: exit code 1: no power (log: {log})\n" in said
    page = (folder / "runs/tiny/results.md").read_text()
    assert (
        f"\nNot in the table, it failed: none/seed-0: exit code 1: no power (log: {log})\n" in page
    )
    assert "[1/2] all/seed-0 finished in " in out
    # What did not fail is reported on, as a whole and not run by run.
    assert f"report: {Path('runs', 'tiny', 'report.html')}\n" in out
    assert [file.parent.name for file in folder.rglob("report.html")] == ["tiny"]
    assert log.read_text().endswith("no power\n")
    results = json.loads(Path("runs/tiny/results.json").read_text())
    assert [len(row["runs"]) for row in results["rows"]] == [0, 1]


SMALL = ["num_steps=1", "rollout.num_groups=4", "rollout.group_size=2", "collapse.every=0"]
SMALL += ["rollout.max_response_tokens=8", "env.0.options.max_turns=1", "filter.keep_zero=true"]


@pytest.mark.parametrize("name", [n for n in study_names() if not read_study(n).of])
def test_the_first_run_of_every_study_trains(name, tmp_path):
    run = plan_runs(read_study(name), SMALL)[0]
    assert len(read_records(train_here(run, tmp_path))) == 1
