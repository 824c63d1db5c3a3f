"""Numbers that are not finite end a run with its step kept and nothing lost."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moored.config import load_config
from moored.engine.local.learner import LocalLearner
from moored.errors import MooredError
from moored.train import build_run, resume, start, train
from tests.e2e.toys import toy_config

OPTIONS = ["num_steps=6", "checkpoint_every=2", "rollout.group_size=4"]


def damage(run, *, before_rollout: bool):
    """A callback that makes one weight NaN after step 3: at once, or when step 4 is updated.

    Sampler and learner compute with the same weights.
    """
    learner = run.engine.learner

    def spoil() -> None:
        weights = dict(learner.weights())
        with torch.no_grad():
            weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")

    def after(record) -> None:
        if record.step != 3:
            return
        if before_rollout:
            spoil()
        else:
            learner.before_updates = spoil

    return after


def test_an_engine_whose_run_cannot_be_built_is_closed(tmp_path, monkeypatch):
    closed = []

    def check():
        raise MooredError("the sampler computes something else")

    engine = SimpleNamespace(check=check, close=lambda: closed.append(True))
    monkeypatch.setattr("moored.train.build_engine", lambda config: engine)
    with pytest.raises(MooredError, match="something else"):
        build_run(load_config({"env": "bandit"}), tmp_path / "run")
    assert closed == [True]


def test_a_loss_that_is_not_finite_keeps_its_minibatch_and_the_run_resumes(toy_folder, tmp_path):
    torch.set_num_threads(1)
    config = toy_config(toy_folder, *OPTIONS, "algorithm.name=grpo", "filter.rule=none")
    start(whole := build_run(config, tmp_path / "whole"))
    train(whole)
    folder = tmp_path / "damaged"
    start(run := build_run(config, folder))
    with pytest.raises(MooredError, match=r"step 4: .* is kept in '.*failed/step_000004'"):
        train(run, damage(run, before_rollout=False))
    # Three steps of two minibatches, and no update after them.
    assert run.engine.learner.version == 6
    kept = folder / "failed" / "step_000004"
    record = json.loads((kept / "failure.json").read_text())
    assert record["stats"]["grad_norm"] == "nan" and len(record["tasks"]) == 8
    assert record["weights_not_finite"] == ["model.layers.0.mlp.up_proj.weight"]
    with np.load(kept / "samples.npz") as arrays:
        assert len({name.split("/")[0] for name in arrays}) == 16  # half of 8 groups of 4
        for number in range(16):
            length = len(arrays[f"{number}/ids_T"])
            assert len(arrays[f"{number}/prompt_ids"]) == 4  # user, letter, end, assistant
            assert arrays[f"{number}/advantages_T"].shape == (length,)
            assert arrays[f"{number}/old_logprobs_T"].max() < 0.0
        assert sum(arrays[f"{n}/weights_T"].sum() for n in range(16)) == pytest.approx(1.0)
    resume(again := build_run(config, folder, resume=True))
    assert again.next_step == 3
    train(again)
    assert (folder / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()


def test_a_sampler_that_finds_the_weights_damaged_keeps_the_step_too(toy_folder, tmp_path):
    torch.set_num_threads(1)
    start(run := build_run(toy_config(toy_folder, *OPTIONS), tmp_path))
    with pytest.raises(MooredError, match=r"step 4: the model's log-probabilities .*step_000004'"):
        train(run, damage(run, before_rollout=True))
    kept = tmp_path / "failed" / "step_000004"
    assert [path.name for path in kept.iterdir()] == ["failure.json"]
    record = json.loads((kept / "failure.json").read_text())
    assert record["weights_not_finite"] == ["model.layers.0.mlp.up_proj.weight"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_gradient_that_is_not_finite_changes_no_weight(toy_folder, tmp_path):
    config = toy_config(toy_folder, "algorithm.name=grpo", "filter.rule=none")
    start(run := build_run(config, tmp_path))
    assert isinstance(run.engine.learner, LocalLearner)
    options = config.algorithm.model_copy(update={"entropy_coef": float("nan")})
    run.engine.learner.config = config.model_copy(update={"algorithm": options})
    before = {name: tensor.clone() for name, tensor in run.engine.learner.weights()}
    with pytest.raises(MooredError, match="grad_norm of an update is not finite"):
        train(run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.engine.learner.weights())


def test_an_error_is_told_even_when_its_record_cannot_be_written(toy_folder, tmp_path):
    start(run := build_run(toy_config(toy_folder, *OPTIONS), tmp_path))
    (tmp_path / "failed").write_text("in the way")
    with pytest.raises(MooredError, match=r"log-probabilities .* is lost: cannot write"):
        train(run, damage(run, before_rollout=True))
