"""`moored diagnose` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moored.cli.main import main

ROW = '{"prompt": "x", "response": "y"}\n'
IDS = (
    '{"prompt": [9], "response": [9999], "think_start": 0, "think_end": 1}\n'
    '{"prompt": [8], "response": [1], "think_start": 0, "think_end": 1}\n'
)


def moored(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from moored.cli.main import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "130"},
        check=False,
    )
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of `nano` that stored the rollouts of both its steps."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("diagnose") / "run"
    options = ["log.rollouts_every=1", "rollout.num_groups=4", "evaluation.every=0"]
    moored("train", "smoke", *options, "collapse.every=0", "--run", folder)
    return folder


def test_a_run_directory_is_diagnosed_with_its_own_model(run):
    done = moored("diagnose", run)
    assert "scoring 2 steps" in done.stderr and "token-forwards, about" in done.stderr
    assert "retrieval" in done.stdout and "last regime:" in done.stdout
    found = json.loads(moored("diagnose", run, "--json", "--draws", "50").stdout)
    assert [look["step"] for look in found["looks"]] == [1, 2]
    for look in found["looks"]:
        report = look["report"]
        assert report["num_prompts"] == 4
        assert 0.0 < report["conditional_entropy_est"] < 2.0
        assert set(report["p_values"]) == {"mi_estimate", "mi_seq_estimate", "retrieval_accuracy"}
        assert look["rewards"]["num_groups"] == 4


def test_one_file_with_another_model_shows_every_metric_and_turn(run):
    file = run / "rollouts" / "step_000001.parquet"
    shown = moored("diagnose", file, "--model", "nano", "--by-turn").stdout
    assert any(line.split()[:2] == ["turn", "M"] for line in shown.splitlines())
    for label in ("MI per token", "ceiling of both", "H(Z|X) per sequence", "95 % interval"):
        assert label in shown


def test_a_page_is_written_beside_the_json_with_turns_of_the_last_step(run, tmp_path):
    page = tmp_path / "page.html"
    done = moored("diagnose", run, "--json", "--draws", "50", "--html", page)
    assert "scoring 2 steps and 1 other turn(s) of the last" in done.stderr
    found, text = json.loads(done.stdout), page.read_text(encoding="utf-8")
    assert [look["turn"] for look in found["turns"]] == [1, 2]
    assert found["turns"][0]["report"] == found["looks"][-1]["report"]
    assert found["turns"][1]["report"]["num_prompts"] == 4
    for look in (found["looks"][-1], *found["turns"]):
        assert f"<td>{look['report']['conditional_entropy_est']:.3f}</td>" in text
    assert f"{found['token_forwards']:,} token-forwards" in text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def refusal(monkeypatch, capsys, *arguments: str | Path) -> str:
    """What a command that cannot work says; in this process, to be quick."""
    monkeypatch.setattr(sys, "argv", ["moored", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    return capsys.readouterr().err


def test_plain_lines_with_a_torn_end_and_a_bad_row_are_diagnosed(tmp_path, monkeypatch, capsys):
    rows = [
        {"prompt": f"Room {p}. What now?", "response": f"<think>room {p}, so {p}</think>up"}
        for p in range(4)
        for _ in range(4)
    ]
    text = "\n".join(map(json.dumps, rows))
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{text}\n{{"prompt": "Room 9"}}\n{{"prompt": "Room')
    said = refusal(monkeypatch, capsys, "diagnose", file, "--model", "nano")
    assert "line 17 has no 'response'" in said
    found = json.loads(moored("diagnose", file, "--model", "nano", "--skip-bad", "--json").stdout)
    assert (found["num_bad_rows"], found["num_torn_rows"]) == (1, 1)
    assert found["looks"][0]["step"] is None


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", ["--model", "nano"], "is empty"),
        ('{"question": 1}\n', ["--model", "nano"], "holds question, but needs"),
        (ROW, ["--model", "nano"], "no response holds"),
        (ROW, ["--model", "nano", "--whole"], "needs 2 distinct prompts"),
        (ROW, [], "--model"),
        (ROW, ["--model", "nano", "--reader", "tlr"], "did you mean 'trl'"),
        (ROW, ["--model", "nano", "--pairs", "4", "--prompts", "8"], "at least --prompts"),
        (ROW, ["--model", "nano", "--by-turn"], "needs files with one row per turn"),
        ("", ["--html", "no/where/page.html"], "folder 'no/where' does not exist"),
        ("", ["--html", "."], "needs a file, got the folder"),
        (IDS, ["--model", "nano"], "token id 9999, but the model knows 1024"),
    ],
)
def test_bad_files_are_one_helpful_line(tmp_path, monkeypatch, capsys, content, arguments, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    said = refusal(monkeypatch, capsys, "diagnose", file, *arguments)
    assert message in said.replace("\n", " ")
