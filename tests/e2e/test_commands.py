"""`moored train`, `eval`, `compare` and `models` as a user types them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from moored.config import load_config
from moored.presets import preset_names, read_presets
from moored.runlog.log import read_records

TINY = ["rollout.group_size=2", "collapse.every=0", "evaluation.every=0"]


def moored(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from moored.cli.main import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done


def test_a_profile_shows_the_phases_and_leaves_a_trace(tmp_path):
    run = tmp_path / "run"
    options = ["num_steps=5", "profile=true", "evaluation.every=0", *TINY]
    shown = moored("train", "smoke", *options, "--run", run).stdout
    table = shown[shown.index("phase") :].splitlines()
    rates = {line.split()[0]: line.split() for line in table if line.strip()}
    assert {"rollout", "update", "step"} <= set(rates)
    seconds = float(rates["rollout"][1])
    generated = read_records(run)[-1]["tokens/generated"]
    assert isinstance(generated, float)
    assert float(rates["rollout"][3].replace(",", "")) == pytest.approx(
        generated / seconds, rel=0.02
    )
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


def test_a_smoke_run_trains_evaluates_compares_and_can_be_looked_at(tmp_path):
    run = tmp_path / "run"
    shown = moored("train", "smoke", "--run", run).stdout
    assert "all 2 steps done" in shown and "retrieval" in shown
    assert [record["step"] for record in read_records(run)] == [1, 2]
    assert len(read_records(run, "collapse")) == 2
    assert yaml.safe_load((run / "config.yaml").read_text())["num_steps"] == 2
    table = moored("compare", run).stdout
    assert "retrieval" in table and "success" in table
    compared = json.loads(moored("compare", run, "--json").stdout)
    assert compared[str(run)]["steps"] == 2
    found = json.loads(moored("eval", run, "-n", "4", "--samples", "2", "--json").stdout)
    assert found["num_tasks"] == 4 and set(found["pass_at"]) == {"1", "2"}
    low, high = found["interval"]
    assert low <= found["success_rate"] <= high
    # A finished run that is resumed has nothing left to do; more steps may be asked for.
    moored("train", "--resume", run, "num_steps=3")
    assert [record["step"] for record in read_records(run)] == [1, 2, 3]


def test_interrupting_saves_and_says_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from moored.cli.main import main; main()", "train", "smoke"),
            *("num_steps=500", "checkpoint_every=500", "--run", str(run), *TINY),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 90
    log = run / "metrics.jsonl"
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped on request" in shown and "moored train --resume" in shown
    last = read_records(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{last:06d}").is_dir()
    assert (run / "model" / "model.safetensors").is_file()


def launch(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from moored.cli.main import main; main()", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_run_killed_at_five_random_moments_ends_like_one_that_was_not(tmp_path):
    options = ["num_steps=14", "checkpoint_every=2", "rollout.group_size=2", "evaluation.every=0"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    moored("train", "smoke", *options, "--run", whole)
    rng = random.Random(0)
    log = killed / "metrics.jsonl"
    for attempt in range(5):
        start = ["smoke", *options, "--run", killed] if attempt == 0 else ["--resume", killed]
        process = launch("train", *start)
        seen, deadline = _size(log), time.monotonic() + 60
        while _size(log) <= seen and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.8)
        process.kill()
        process.wait()
    moored("train", "--resume", killed)
    for stream in ("metrics.jsonl", "collapse.jsonl"):
        assert (killed / stream).read_bytes() == (whole / stream).read_bytes()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "smoke", "device=abacus"], "unknown device 'abacus'; use auto"),
        (["eval", "nano"], "give --env"),
        (["eval", "nano", "--env", "bandit", "--split", "tset"], "split must be one of"),
        (["compare", "no_such_run"], "run directory"),
    ],
)
def test_mistakes_are_one_helpful_line(arguments, message, tmp_path):
    done = moored(*arguments, expect=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_models_lists_what_is_embedded():
    names = [row["name"] for row in json.loads(moored("models", "--json").stdout)]
    assert names[:2] == ["mini", "nano"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_configuration(name):
    load_config(read_presets([name]))


def test_later_presets_win_key_by_key():
    merged = read_presets(["grpo", "no_filter"])
    assert merged["algorithm"]["name"] == "grpo"  # pyright: ignore[reportIndexIssue]
    assert load_config(read_presets(["dapo", "no_filter"])).filter.rule == "none"
