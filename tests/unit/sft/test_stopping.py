"""Killed and stopped at any moment, with real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.runlog.log import read_records

pytest.importorskip("transformers")
from moored.sft import loop
from tests.warm import WarmProcess

NUM_STEPS = 16
SLOWLY = ["env=tests.unit.sft.lessons:Slow", f"num_steps={NUM_STEPS}", "checkpoint_every=4"]
SLOWLY += ["batch_tokens=1", "evaluation.num_tasks=0", "evaluation.num_dialogues=2"]
GONE_S = 10.0


def launch(folder: Path, *words: str) -> WarmProcess:
    return WarmProcess(["sft", *words], cwd=folder)


def wait_for_steps(run: Path, count: int, process: WarmProcess) -> None:
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Processes that a process started, also from other threads than its first."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text().split()]


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + GONE_S
    files = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    # A process that only waits to be collected has no command line.
    while any(file.exists() and file.read_bytes() for file in files):
        assert time.monotonic() < deadline, f"one of {pids} goes on without its run"
        time.sleep(0.01)


def test_a_run_that_was_killed_and_stopped_ends_with_the_weights_of_one_that_was_not(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    def sft(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["moored", "sft", *words])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert (left.value.code or 0) == code, said.err
        return said.out, said.err

    run, whole = tmp_path / "run", tmp_path / "whole"
    killed = launch(tmp_path, str(tiny_folder), *SLOWLY, "workers=1", "--run", "run")
    wait_for_steps(run, 7, killed)
    players = children_of(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    if sys.platform == "linux":
        assert len(players) == 1
        wait_for_end(players)
    # Any number of workers goes on with it.
    with monkeypatch.context() as patch:
        patch.setattr(loop, "sft_step", stopping_at(12, loop.sft_step))
        shown, _ = sft("--resume", "run", "workers=0", code=143)
    assert "changed: workers from 1 to 0\n" in shown
    assert "stopped on request after step 12\n" in shown
    assert shown.endswith("go on with: moored sft --resume run\n")
    sft("--resume", "run")
    (change,) = read_records(run, "changes")
    assert change["options"] == {"workers": {"old": 1, "new": 0}}
    sft(str(tiny_folder), *SLOWLY, "workers=0", "--run", "whole")
    for file in ("metrics.jsonl", "model/model.safetensors", "config.yaml"):
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file


def stopping_at(last: int, do_step):
    """The step, and SIGTERM to this process while step `last` is done."""

    def do(run, step):
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return do_step(run, step)

    return do
