"""`moored train` before its loop: mistakes are found without torch; a signal asks to stop."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import threading
import time

import pytest

from moored.cli.run_folders import claim_folder
from moored.cli.stopping import RETRY_S, StopRequest, clean_interrupts
from moored.cli.train import _run_name
from moored.models.find import embedded_models
from moored.presets import describe_presets
from tests.warm import run_warm

PROBE = """
import sys
from moored.cli.main import main
try:
    main()
finally:
    print(sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smok"], "unknown preset 'smok'; did you mean 'smoke'?"),
        (["smoke", "filter.valeu=1"], "unknown option 'filter.valeu'; did you mean 'value'?"),
        (["smoke", "filter.rule=top_q"], "filter.rule"),
        (["smoke", "env=sokobn"], "unknown environment 'sokobn'; did you mean 'sokoban'?"),
        (["smoke", "env.0.options.max_turn=3"], "no option 'max_turn'; did you mean 'max_turns'?"),
        (["smoke", "env.0.options.max_turns=0"], "max_turns must be"),
        (["smoke", "model=nanoo"], "neither embedded nor a folder; did you mean 'nano'?"),
        (["smoke", "model=."], "model folder '.' holds no config.json"),
        (["--resume", "no_such_run"], "'no_such_run' is not a run directory: it has no config"),
        (["sokoban", "bandit"], "or mix them: 'env=[sokoban, bandit]'"),
        (["smoke", "--resume", "x"], "takes options only"),
        (["--resume", "x", "--run", "y"], "--resume goes on in 'x' itself; leave --run 'y' out"),
        (["smoke", "--run", "taken"], "'taken' already holds a run"),
        (["smoke", "--run", "file/run"], "file' is not a folder; choose another folder"),
    ],
)
def test_a_mistake_is_one_line_and_does_not_wait_for_torch(tmp_path, words, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    done = run_warm(["train", *words], code=PROBE, cwd=tmp_path, slim=True)
    assert done.returncode == 2
    first, imported = done.stderr.splitlines()
    assert first.startswith("moored: ") and message in first
    assert imported == "[]"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_position_embeddings": 512}, "is longer than the 512 tokens that this llama model"),
        ({"sliding_window": 512}, "with layers that look back 512 tokens only cannot be used"),
    ],
)
def test_dialogues_longer_than_a_folder_reads_are_refused_without_torch(tmp_path, values, message):
    folder = shutil.copytree(embedded_models()["nano"], tmp_path / "short")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **values}))
    words = ["train", "smoke", "model=./short", "rollout.max_context=2048"]
    done = run_warm(words, code=PROBE, cwd=tmp_path, slim=True)
    assert done.returncode == 2
    first, imported = done.stderr.splitlines()
    assert message in first and "512 or less" in first
    assert imported == "[]"
    assert [file.name for file in tmp_path.iterdir()] == ["short"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_to_stop_and_the_second_stops_at_once(number, code, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_made and stop.exit_code == 0
        stop.wait_for_step()
        os.kill(os.getpid(), number)
        assert stop.is_made and stop.exit_code == code
        said = "\nstopping after this step; Ctrl-C or SIGTERM again stops at once\n"
        assert capfd.readouterr().err == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_one_signal_is_enough(number, capfd):
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert stop.exit_code == 128 + number
    assert capfd.readouterr().err == ""


def test_a_signal_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    # Raised in the middle of `import torch`, it ends the process with SIGABRT.
    lines = ["import os, time", f"os.kill(os.getpid(), {int(signal.SIGTERM)})", "time.sleep(0.2)"]
    (tmp_path / "slow_import.py").write_text("\n".join([*lines, "is_whole = True"]))
    monkeypatch.syspath_prepend(tmp_path)
    with StopRequest() as stop:
        module = importlib.import_module("slow_import")
        assert module.is_whole and stop.is_made
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
        assert time.monotonic() - began_s < 30  # it ends the sleep itself
    assert stop.exit_code == 143


def test_a_signal_is_not_lost_in_a_finaliser(capfd):
    class Dying:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    with StopRequest(), pytest.raises(KeyboardInterrupt):
        Dying()
        time.sleep(60)
    assert capfd.readouterr().err == ""


def test_a_second_signal_does_not_wait_for_the_import(tmp_path, monkeypatch):
    kill = f"os.kill(os.getpid(), {int(signal.SIGINT)})"
    (tmp_path / "endless_import.py").write_text(f"import os\n{kill}\n{kill}\nis_whole = True")
    monkeypatch.syspath_prepend(tmp_path)
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        importlib.import_module("endless_import")
    assert stop.exit_code == 130


def test_a_signal_that_waited_until_steps_run_asks_to_stop(tmp_path, monkeypatch, capfd):
    kill = f"os.kill(os.getpid(), {int(signal.SIGINT)})"
    (tmp_path / "late_import.py").write_text(f"import os\n{kill}")
    monkeypatch.syspath_prepend(tmp_path)
    with StopRequest() as stop:
        importlib.import_module("late_import")
        stop.wait_for_step()
        time.sleep(10 * RETRY_S)
        assert stop.is_made
    assert capfd.readouterr().err.startswith("\nstopping after this step")


def test_ctrl_c_in_an_import_ends_a_command_after_it(tmp_path, monkeypatch):
    kill = f"os.kill(os.getpid(), {int(signal.SIGINT)})"
    (tmp_path / "last_import.py").write_text(f"import os\n{kill}\nis_whole = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(SystemExit) as left, clean_interrupts():
        module = importlib.import_module("last_import")
    assert module.is_whole and left.value.code == 130


def test_a_command_that_ignores_ctrl_c_behind_an_ampersand_still_does():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with clean_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_in_a_thread_leaves_signals_to_the_main_one():
    found = []

    def command() -> None:
        with clean_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=command)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_run_without_a_name_takes_the_next_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(claim_folder(_run_name(["sokoban", "my/own.yaml"]))) == "runs/sokoban-own"
    # The folder exists from then on, so that runs started at the same moment do not meet.
    assert str(claim_folder(_run_name(["sokoban", "my/own.yaml"]))) == "runs/sokoban-own-2"
    assert str(claim_folder(_run_name([]))) == "runs/run"
    assert _run_name(["sokoban", "qwen2.5-0.5b"]) == "sokoban-qwen2.5-0.5b"


def test_train_alone_shows_help_and_presets_instead_of_starting(tmp_path):
    done = run_warm(["train"], cwd=tmp_path, slim=True)
    assert done.returncode == 2
    assert done.stdout.startswith("Usage: moored train")
    for name, summary in describe_presets().items():
        assert any(line.split() == [name, *summary.split()] for line in done.stdout.splitlines())
    assert not list(tmp_path.iterdir())
