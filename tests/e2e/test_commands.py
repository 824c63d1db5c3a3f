"""`moored train`, `eval`, `compare` and `models` as a user types them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import yaml

from moored.config import load_config
from moored.presets import preset_names, read_presets
from moored.runlog.log import read_records
from tests.e2e.toys import HERE
from tests.warm import WarmProcess, main_on_full_disk, run_warm

TINY = ["rollout.group_size=2", "collapse.every=0", "evaluation.every=0"]


def moored(*arguments: str | Path) -> str:
    """What a command shows, run in a process of its own."""
    done = run_warm(arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_profile_shows_the_phases_and_leaves_a_trace(tmp_path):
    run = tmp_path / "run"
    options = ["num_steps=5", "profile=true", "rollout.max_response_tokens=8", *TINY]
    shown = moored("train", "smoke", *options, "--run", run)
    table = shown[shown.index("phase") :].splitlines()
    rates = {line.split()[0]: line.split() for line in table if line.strip()}
    assert {"rollout", "update", "step"} <= set(rates)
    # Step 5 alone comes after the traced one.
    generated = float(str(read_records(run)[-1]["tokens/generated"]))
    rollout_s = float(str(read_records(run, "timing")[-1]["rollout_s"]))
    assert rates["rollout"][3] == f"{generated / rollout_s:,.0f}"
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


def test_a_smoke_run_trains_evaluates_compares_and_can_be_looked_at(tmp_path, here):
    run = tmp_path / "run"
    shown = moored("train", "smoke", "--run", run)
    assert "all 2 steps done" in shown and "retrieval" in shown
    assert f"\nrun directory: {run}\n" in shown  # however long the path is
    assert [record["step"] for record in read_records(run)] == [1, 2]
    assert len(read_records(run, "collapse")) == 2
    assert yaml.safe_load((run / "config.yaml").read_text())["num_steps"] == 2
    table = here("compare", run)
    assert "retrieval" in table and "success" in table
    (compared,) = json.loads(here("compare", run, "--json"))["arms"]
    assert compared["runs"] == [str(run)] and compared["last_steps"] == [2]
    found = json.loads(here("eval", run, "-n", "4", "--samples", "2", "--json"))
    assert found["num_tasks"] == 4 and set(found["pass_at"]) == {"1", "2"}
    low, high = found["interval"]
    assert low <= found["success_rate"] <= high
    # A finished run that is resumed has nothing left to do; more steps may be asked for.
    here("train", "--resume", run, "num_steps=3")
    assert [record["step"] for record in read_records(run)] == [1, 2, 3]
    assert yaml.safe_load((run / "config.yaml").read_text())["num_steps"] == 3


@pytest.mark.parametrize("has_collapsed", [True, False])
def test_a_run_that_ends_collapsed_says_how_to_find_out_more(
    has_collapsed, tmp_path, here, monkeypatch
):
    monkeypatch.setattr("moored.cli.progress.StepProgress.has_collapsed", has_collapsed)
    run = tmp_path / "a run"
    few = ["num_steps=1", "rollout.max_response_tokens=4", *TINY]
    shown = here("train", "smoke", *few, "--run", run, "--no-report")
    assert (f"what to do: moored diagnose '{run}'\n" in shown) == has_collapsed


def test_a_run_killed_at_five_random_moments_ends_like_one_that_was_not(toy_folder, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = [f"model={toy_folder}", f"env={HERE}:Echo", "num_steps=80", "checkpoint_every=2"]
    options += ["rollout.max_response_tokens=2", "evaluation.every=0", "filter.rule=none"]
    options += ["stop.low_variance=0", "optimizer.lr=1e-3", "collapse.every=8"]
    other = WarmProcess(["train", "smoke", *options, "--run", whole])
    rng, log, seen = random.Random(0), killed / "metrics.jsonl", 0
    for attempt in range(5):
        words = ["smoke", *options, "--run", killed] if attempt == 0 else ["--resume", killed]
        process = WarmProcess(["train", *words])
        while not log.exists() or log.stat().st_size <= seen:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.communicate()
        seen = log.stat().st_size
    assert len(read_records(killed)) < 80
    moored("train", "--resume", killed)
    other.communicate()
    assert len(read_records(whole)) == 80
    for stream in ("metrics.jsonl", "collapse.jsonl", "model/model.safetensors"):
        assert (killed / stream).read_bytes() == (whole / stream).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "smoke", "engine.device=abacus"], "unknown device 'abacus'; use auto"),
        (["eval", "nano"], "give --env"),
        (
            ["eval", "nano", "--env", "bandit", "--split", "tset"],
            "evaluation.split = 'tset': input",
        ),
        (["eval", "nanoo", "--env", "bandit"], "model 'nanoo' is neither embedded"),
        (["compare", "no_such_run"], "run directory"),
    ],
)
def test_mistakes_are_one_helpful_line(arguments, message, here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = here(*arguments, expect=2)
    assert said.startswith("moored: ") and said.count("\n") == 1
    assert message in said


def test_a_disk_that_is_full_ends_a_run_with_one_sentence(tmp_path):
    # Config and logs fit, weights of 4 MB do not.
    words = ["train", "smoke", "num_steps=1", *TINY, "--run", tmp_path / "run"]
    done = run_warm(words, code=main_on_full_disk(200_000))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("moored: cannot write ") and done.stderr.count("\n") == 1


def test_models_lists_what_is_embedded(here):
    names = [row["name"] for row in json.loads(here("models", "--json"))]
    assert names[:2] == ["mini", "nano"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_configuration(name):
    load_config(read_presets([name]))


def test_later_presets_win_key_by_key():
    merged = read_presets(["grpo", "no_filter"])
    assert merged["algorithm"]["name"] == "grpo"  # pyright: ignore[reportIndexIssue]
    assert load_config(read_presets(["dapo", "no_filter"])).filter.rule == "none"
