"""Killed and stopped at any moment, with real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from moored.cli.main import main

pytest.importorskip("transformers")
from moored.sft import loop
from tests.warm import WarmProcess

NUM_STEPS = 16
SLOWLY = ["env=tests.unit.sft.lessons:Slow", f"num_steps={NUM_STEPS}", "checkpoint_every=4"]
SLOWLY += ["batch_tokens=1", "evaluation.num_tasks=0", "evaluation.num_dialogues=2"]


def launch(folder: Path, *words: str) -> WarmProcess:
    return WarmProcess(["sft", *words], cwd=folder)


def wait_for_steps(run: Path, count: int, process: WarmProcess) -> None:
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
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
    killed = launch(tmp_path, str(tiny_folder), *SLOWLY, "--run", "run")
    wait_for_steps(run, 7, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "sft_step", stopping_at(12, loop.sft_step))
        shown, _ = sft("--resume", "run", code=143)
    assert "stopped on request after step 12\n" in shown
    assert shown.endswith("go on with: moored sft --resume run\n")
    sft("--resume", "run")
    sft(str(tiny_folder), *SLOWLY, "--run", "whole")
    for file in ("metrics.jsonl", "config.yaml", "model/model.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes(), file


def stopping_at(last: int, do_step):
    """The step, and SIGTERM to this process while step `last` is done."""

    def do(run, step):
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return do_step(run, step)

    return do
