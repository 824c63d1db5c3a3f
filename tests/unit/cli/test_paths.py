"""Paths are printed as they are: not wrapped on a narrow terminal, not parsed as markup."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.models.find import embedded_models

NAME = "[ablation]:warning:_of_the_second_seed_under_a_long_name"
LINE = {"schema": 1, "rollout/success_rate": 0.5, "rollout/reward_mean": 0.1}
ROLLOUT = {"step": 1, "prompt": "p", "response": "<think>a</think><answer>b</answer>", "reward": 1}
TOY = """
class Env:
    name = "toy"
    def __init__(self):
        raise ValueError(__file__)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose name looks like markup, seen on a terminal of 40 columns."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = tmp_path / NAME
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    lines = [json.dumps({**LINE, "step": step}) + "\n" for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "rollouts.jsonl").write_text("".join([json.dumps(ROLLOUT) + "\n"] * 4))
    (run / "toy.py").write_text(TOY)
    return run


def shown(monkeypatch: pytest.MonkeyPatch, capsys, *arguments: str | Path) -> str:
    """Everything a command prints, colours taken out."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["moored", *map(str, arguments)])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    return (out + err).replace("\x1b[1m", "").replace("\x1b[0m", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "{run}"],
        ["eval", "{run}"],
        ["eval", "{run}/none", "--env", "bandit"],
        ["diagnose", "{run}/none.jsonl", "--model", "nano"],
        ["advise", "{run}/none.jsonl"],
        ["config", "{run}"],
        ["config", "model={run}"],
        ["train", "{run}"],
        ["train", "smoke", "--run", "{run}"],
        ["play", "sokoban", "--oracle", "--image", "{run}/frames"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_folder_with_brackets_is_printed_whole(monkeypatch, capsys, folder, arguments):
    words = [word.format(run=folder) for word in arguments]
    assert str(folder) in shown(monkeypatch, capsys, *words)


def test_check_env_prints_the_place_of_an_error_whole(monkeypatch, capsys, folder):
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    assert str(folder / "toy.py") in shown(monkeypatch, capsys, "check-env", "toy:Env")


def test_diagnose_prints_the_model_that_scores_whole(monkeypatch, capsys, folder):
    model = Path(shutil.copytree(embedded_models()["nano"], folder / "model"))
    rows = [
        {**ROLLOUT, "prompt": f"prompt {i % 2}", "response": f"<think>thought {i}</think>"}
        for i in range(8)
    ]
    file = folder / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["diagnose", file, "--model", model, "--draws", "0", "--tags", "<think>", "</think>"]
    assert str(model) in shown(monkeypatch, capsys, *words)
