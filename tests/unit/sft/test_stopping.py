"""Killed and stopped at any moment, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.runlog.log import read_records

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
ENTRY = "from moored.cli.main import main; main()"
NUM_STEPS = 40
SLOWLY = ["env=tests.unit.sft.lessons:Slow", f"num_steps={NUM_STEPS}", "checkpoint_every=4"]
SLOWLY += ["batch_tokens=1", "evaluation.num_tasks=0", "evaluation.num_dialogues=2"]


def launch(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, "sft", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_a_run_that_was_killed_and_stopped_ends_with_the_weights_of_one_that_was_not(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    def finish(*words: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["moored", "sft", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code, capsys.readouterr().err

    run, whole = tmp_path / "run", tmp_path / "whole"
    killed = launch(tmp_path, str(tiny_folder), *SLOWLY, "--run", "run")
    wait_for_steps(run, 7, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    stopped = launch(tmp_path, "--resume", "run")
    # Going on from the checkpoint of step 4 or a later one, beyond what was done before.
    wait_for_steps(run, len(read_records(run)) + 3, stopped)
    stopped.send_signal(signal.SIGTERM)
    shown, said = stopped.communicate()
    assert stopped.returncode == 143, said
    assert "stopping after this step" in said
    assert shown.endswith("go on with: moored sft --resume run\n")
    step = int(str(read_records(run)[-1]["step"]))
    assert step < NUM_STEPS and f"stopped on request after step {step}\n" in shown
    finish("--resume", "run")
    finish(str(tiny_folder), *SLOWLY, "--run", "whole")
    for file in ("metrics.jsonl", "config.yaml", "model/model.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file
