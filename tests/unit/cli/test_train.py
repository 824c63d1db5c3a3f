"""`moored train` before its loop: mistakes are found without torch; a signal asks to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from moored.cli.train import _free_folder, _StopRequest

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
        (["smoke", "model=nanoo"], "model 'nanoo' is neither embedded (mini, nano, smollm2) nor"),
        (["smoke", "model=."], "model folder '.' holds no config.json"),
        (["--resume", "no_such_run"], "No such file"),
        (["smoke", "--resume", "x"], "takes options only"),
        (["smoke", "--run", "taken"], "'taken' already holds a run"),
        (["smoke", "--run", "file/run"], "file' is not a folder; choose another folder"),
    ],
)
def test_a_mistake_is_one_line_and_does_not_wait_for_torch(tmp_path, words, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", PROBE, "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    first, imported = done.stderr.splitlines()
    assert first.startswith("moored: ") and message in first
    assert imported == "[]"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_stops_at_once(number, capfd):
    before = signal.getsignal(number)
    with _StopRequest() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
        said = "\nstopping after this step; press Ctrl-C again to stop at once\n"
        assert capfd.readouterr().err == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_run_without_a_name_gets_the_next_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(_free_folder(["sokoban", "my/own.yaml"])) == "runs/sokoban-own"
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run-2").mkdir()
    assert str(_free_folder([])) == "runs/run-3"
