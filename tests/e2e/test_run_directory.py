"""What a run leaves behind: rollouts and curves, the same whether it was stopped or not."""

from __future__ import annotations

import sys

import pytest
import torch

from moored.config import load_config
from moored.errors import ConfigError
from moored.presets import read_presets
from moored.runlog.log import read_records
from moored.runlog.rollouts import read_groups
from moored.train import build_run, resume, start, train
from tests.warm import run_warm

OPTIONS = ["num_steps=3", "checkpoint_every=2", "collapse.every=2", "evaluation.every=0"]
OPTIONS += ["rollout.group_size=2", "rollout.max_response_tokens=48"]
OPTIONS += ["env.0.options.max_turns=1", "log.rollouts_every=1", "log.sinks=[tensorboard]"]


def interrupt_after(step: int):
    def stop(record) -> None:
        if record.step == step:
            raise KeyboardInterrupt

    return stop


def test_a_resumed_run_stores_the_same_rollouts_and_continues_its_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.set_num_threads(1)
    config = load_config(read_presets(["smoke"]), OPTIONS)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = build_run(config, whole)
    start(run)
    train(run)
    run.close()
    run = build_run(config, broken)
    start(run, command=["moored", "train", "smoke"])
    with pytest.raises(KeyboardInterrupt):
        train(run, interrupt_after(3))
    run.close()
    # What was stored after the checkpoint is void.
    (broken / "rollouts" / "step_000004.parquet").write_bytes(b"from another life")
    run = build_run(config, broken, resume=True)
    resume(run, command=["moored", "train", "--resume", "broken"])
    train(run)
    run.close()
    first, second = read_records(broken, "starts")
    assert (first["step"], second["step"]) == (0, 2)
    assert (first["command"], second["command"]) == (
        ["moored", "train", "smoke"],
        ["moored", "train", "--resume", "broken"],
    )
    names = [f"step_{step:06d}.parquet" for step in (1, 2, 3)]
    for folder in (whole, broken):
        assert sorted(file.name for file in (folder / "rollouts").iterdir()) == names
    scores = [f"scores/step_{step:06d}.npz" for step in (1, 2)]
    for name in ("metrics.jsonl", *scores, *(f"rollouts/{name}" for name in names)):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    stored = read_groups(whole / "rollouts" / names[-1])
    rewards = [t.reward for group in stored for t in group.trajectories]
    assert sum(rewards) / 4 == pytest.approx(read_records(whole)[-1]["rollout/reward_mean"])
    events = EventAccumulator(str(broken / "tensorboard")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["rollout/reward_mean"] == steps["rollout_s"] == [1, 2, 3]
    assert steps["collapse/valid_thinking_rate"] == [1, 2]


def test_resuming_a_run_that_ended_early_takes_it_no_step_further(tmp_path):
    torch.set_num_threads(1)
    words = ["rollout.group_size=2", "rollout.max_response_tokens=4", "collapse.every=0"]
    words += ["num_steps=3", "evaluation.every=0", "filter.max_empty_steps=1"]
    config = load_config(read_presets(["smoke"]), words)
    run = build_run(config, tmp_path / "run")
    start(run)
    ended = train(run)
    run.close()
    assert ended.startswith("1 step had no group with reward variance to train on: ")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run = build_run(config, tmp_path / "run", resume=True)
    resume(run)
    assert train(run) == ended
    run.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    longer = load_config(read_presets(["smoke"]), [*words, "filter.max_empty_steps=9"])
    run = build_run(longer, tmp_path / "run", resume=True)
    resume(run)
    assert train(run) == "all 3 steps done"
    run.close()


def test_a_sink_without_its_package_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = load_config(read_presets(["smoke"]), ["log.sinks=[trackio]"])
    with pytest.raises(ConfigError, match=r"pip install 'moored\[trackio\]'"):
        build_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["optimizer.lora_rank=2"]])
def test_a_finished_run_may_keep_its_model_alone(tmp_path, more):
    folder = tmp_path / "run"
    words = ["smoke", *OPTIONS, "log.sinks=[]", "keep_checkpoints=0", *more]
    assert run_warm(["train", *words, "--run", folder, "--no-report"]).returncode == 0
    assert not (folder / "checkpoints").exists()
    logged = (folder / "metrics.jsonl").read_bytes()
    assert "all 3 steps done" in run_warm(["train", "--resume", folder]).stdout
    assert (folder / "metrics.jsonl").read_bytes() == logged
    done = run_warm(["train", "--resume", folder, "num_steps=4"])
    assert done.returncode == 2
    assert "has done its 3 steps and kept only its model" in " ".join(done.stderr.split())
    assert "on 2 tasks" in run_warm(["eval", folder, "-n", "2"]).stdout


def test_a_run_that_was_stopped_keeps_a_checkpoint_to_go_on_from(tmp_path):
    config = load_config(read_presets(["smoke"]), [*OPTIONS, "log.sinks=[]", "keep_checkpoints=0"])
    run = build_run(config, tmp_path / "run")
    start(run)
    assert train(run, lambda record: record.step == 2) == "stopped on request after step 2"
    run.close()
    assert [f.name for f in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
