"""Two processes and one run directory; signals; going on afterwards. All with real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import yaml

from moored.runlog.log import read_records
from tests.warm import WarmProcess, run_warm

TINY = ["rollout.group_size=2", "rollout.max_response_tokens=8", "evaluation.every=0"]
TINY += ["filter.rule=none", "stop.low_variance=0", "collapse.every=2"]

SLOW = """
import time

from moored.envs.bandit import Bandit


class Slow(Bandit):
    def step(self, reply):
        time.sleep(50)
        return super().step(reply)


class SlowEngine:
    def __init__(self, config, *, trains):
        print("loading", flush=True)
        time.sleep(50)
"""


def launch(folder: Path, *words: str) -> WarmProcess:
    """`moored train words…` in `folder`, as a process of its own."""
    return WarmProcess(["train", *words], cwd=folder)


def finish(process: WarmProcess, expect: int = 0) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == expect, err
    return out, err


def wait_for_steps(run: Path, count: int, process: WarmProcess) -> None:
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_second_process_is_refused_and_sigterm_and_resume_change_nothing(tmp_path, toy_folder):
    run, whole = tmp_path / "run", tmp_path / "whole"
    toy = [*TINY, f"model={toy_folder}", "env=tests.e2e.toys:Echo"]
    first = launch(tmp_path, "smoke", *toy, "num_steps=5000", "--run", "run")
    wait_for_steps(run, 2, first)
    # While it trains, nobody else may write, neither a resumed run nor a new one. It is halted
    # meanwhile: what it does here is done again below.
    first.send_signal(signal.SIGSTOP)
    for words, why in (
        (["--resume", "run"], f"another process (pid {first.pid} on "),
        (["smoke", "--run", "run"], "'run' already holds a run"),
    ):
        _, said = finish(launch(tmp_path, *words), expect=2)
        assert said.startswith(f"moored: {why}") and said.count("\n") == 1
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGCONT)
    shown, said = finish(first, expect=143)
    assert "stopping after this step; Ctrl-C or SIGTERM again stops at once" in said
    assert shown.endswith("run directory: run\ngo on with: moored train --resume run\n")
    stopped_at = int(str(read_records(run)[-1]["step"]))
    assert f"stopped on request after step {stopped_at}\n" in shown
    assert (run / "checkpoints" / f"step_{stopped_at:06d}").is_dir()

    last = f"num_steps={stopped_at + 2}"
    shown, _ = finish(launch(tmp_path, "--resume", "run", last))
    assert f"changed: num_steps from 5000 to {stopped_at + 2}\n" in shown
    finish(launch(tmp_path, "smoke", *toy, last, "--run", "whole"))
    for name in ("metrics.jsonl", "collapse.jsonl", "config.yaml"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    names = ["model.safetensors"]
    assert all(
        (run / "model" / n).read_bytes() == (whole / "model" / n).read_bytes() for n in names
    )
    (change,) = read_records(run, "changes")
    assert change["step"] == stopped_at
    assert change["options"] == {"num_steps": {"old": 5000, "new": stopped_at + 2}}
    assert read_records(whole, "changes") == []
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 1e-4


def test_a_change_that_resuming_cannot_make_is_refused_before_torch_is_loaded(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("num_steps: 3\n")
    _, said = finish(launch(tmp_path, "--resume", "run", "seed=1"), expect=2)
    assert said.startswith("moored: seed cannot change when a run is resumed (0 to 1): ")
    assert said.count("\n") == 1
    assert (run / "config.yaml").read_text() == "num_steps: 3\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_does_not_wait_for_the_step(tmp_path, number, code):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["smoke", "env=slow:Slow", *TINY]
    process = launch(tmp_path, *words)
    assert process.stdout is not None and process.stderr is not None
    # The header comes before the first step, which takes minutes.
    header = [process.stdout.readline() for _ in range(4)]
    assert header[0] == "model: nano, 1.2 million parameters, cpu, float32\n"
    assert header[1].startswith("each step: 2 prompts of slow:Slow x 2 = 4 episodes, then ppo (")
    assert header[2:] == ["steps: 2\n", "run directory: runs/smoke\n"]
    time.sleep(0.5)
    process.send_signal(number)
    while "stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    shown, _ = finish(process, expect=code)
    assert "stopped at once; there is no checkpoint yet, so it begins again\n" in shown
    assert shown.endswith("go on with: moored train --resume runs/smoke\n")


def test_a_signal_while_the_model_is_loaded_leaves_nothing_behind(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    process = launch(tmp_path, "smoke", "engine.kind=slow:SlowEngine")
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGTERM)
    _, said = finish(process, expect=143)
    assert said == "stopped before the first step\n"
    assert not list((tmp_path / "runs").iterdir())


TWO_SIGNALS = """
import os, signal
import {module} as stopped

def stop_at_once(*_, **__):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)

stopped.{name} = stop_at_once
from moored.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("module", "name", "lost"),
    [
        ("moored.train", "_export", "it goes on after the checkpoint of step 2"),
        ("moored.train", "save_checkpoint", "there is no checkpoint yet, so it begins again"),
    ],
)
def test_two_signals_after_the_last_step_do_not_pass_for_a_finished_run(
    tmp_path, toy_folder, module, name, lost
):
    words = ["train", "smoke", *TINY, f"model={toy_folder}", "env=tests.e2e.toys:Echo"]
    done = run_warm(
        [*words, "num_steps=2", "--run", "run"],
        code=TWO_SIGNALS.format(module=module, name=name),
        cwd=tmp_path,
    )
    assert done.returncode == 143, done.stdout
    assert f"stopped at once; {lost}\n" in done.stdout
    assert done.stdout.endswith("go on with: moored train --resume run\n")
    assert not (tmp_path / "run" / "model").exists()
    finish(launch(tmp_path, "--resume", "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("written_whole", "it goes on after the checkpoint of step 2"),
        ("save_checkpoint", "there is no checkpoint yet, so it begins again"),
    ],
)
def test_two_signals_after_the_last_step_of_a_warm_start_do_not_pass_for_its_end(
    tmp_path, toy_folder, name, lost
):
    words = ["sft", toy_folder, "env=bandit", "num_steps=2", "batch_tokens=64", "--run", "run"]
    words += ["evaluation.num_tasks=0", "evaluation.num_dialogues=0"]
    code = TWO_SIGNALS.format(module="moored.sft.loop", name=name)
    done = run_warm(words, code=code, cwd=tmp_path)
    assert done.returncode == 143, done.stdout
    assert f"stopped at once; {lost}\n" in done.stdout
    assert done.stdout.endswith("go on with: moored sft --resume run\n")
    assert run_warm(["sft", "--resume", "run"], cwd=tmp_path).returncode == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_run_that_stops_itself_says_so_in_its_last_line_and_by_its_exit_code(
    tmp_path, toy_folder
):
    words = [*TINY, f"model={toy_folder}", "env=tests.e2e.toys:Echo", "filter.max_empty_steps=2"]
    words += ["filter.rule=nonzero", "filter.eps=1", "num_steps=5", "--no-report"]
    stopped = ["smoke", *words, "--run", "run"], ["--resume", "run", "--no-report"]
    for started in stopped:
        last = finish(launch(tmp_path, *started), expect=5)[0].splitlines()[-1]
        assert last.startswith("stopped early, after step 2 of 5: 2 steps in a row had no group")
    # In its last step there is nothing left to stop.
    finish(launch(tmp_path, "smoke", *words, "num_steps=2", "--run", "whole"))


def test_a_run_without_progress_says_so_at_its_end(tmp_path, toy_folder):
    words = [*TINY, f"model={toy_folder}", "env=bandit", "num_steps=6", "rollout.num_groups=16"]
    words += ["collapse.every=0", "rollout.max_context=2048", "rollout.max_response_tokens=1"]
    out, _ = finish(launch(tmp_path, "smoke", *words, "--run", "run", "--no-report"))
    assert "\nno progress since step 1: success 0.00 in steps 1 to 1 " in out
