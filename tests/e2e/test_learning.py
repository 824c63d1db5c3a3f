"""Every algorithm solves a toy, and a killed run continues as if nothing had happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moored.names import ALGORITHMS
from moored.runlog.log import read_records
from moored.runlog.rollouts import read_groups
from moored.train import build_run, resume, start, train
from moored.training.samples import build_samples, overlong_penalty
from tests.e2e.toys import rates_until_solved, success_rates, toy_config, weights_of

QUICKLY = ["rollout.num_groups=4", "optimizer.lr=4e-3"]
"""Half of the episodes and larger steps, which these toys can take."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_solves_the_toy(name, toy_folder, tmp_path):
    torch.set_num_threads(1)
    config = toy_config(toy_folder, f"algorithm.name={name}", *QUICKLY)
    rates = rates_until_solved(build_run(config, tmp_path / "run"))
    assert np.mean(rates[:2]) < 0.2
    assert np.mean(rates[-5:]) > 0.9


@pytest.mark.parametrize("action", ["drop", "mask", "refill", "soft"])
def test_every_filter_action_trains(action, toy_folder, tmp_path):
    torch.set_num_threads(1)
    options = ["algorithm.name=grpo", "algorithm.kl_coef=0", f"filter.action={action}"]
    config = toy_config(toy_folder, *options, *QUICKLY)
    assert np.mean(rates_until_solved(build_run(config, tmp_path / "run"))[-5:]) > 0.9


def test_masking_and_dropping_make_the_same_update(toy_folder, tmp_path):
    torch.set_num_threads(1)
    weights = []
    for action in ("drop", "mask"):
        config = toy_config(
            toy_folder,
            "algorithm.name=grpo",
            f"filter.action={action}",
            "num_steps=3",
            "optimizer.num_minibatches=1",
        )
        run = build_run(config, tmp_path / action)
        success_rates(run)
        weights.append(weights_of(run))
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(tensor.numpy(), weights[1][name].numpy(), atol=1e-5)


def test_a_resumed_run_writes_the_same_files_as_one_that_never_stopped(toy_folder, tmp_path):
    torch.set_num_threads(1)
    options = ["algorithm.name=ppo", "num_steps=9", "checkpoint_every=3", "evaluation.every=4"]
    options += ["evaluation.num_tasks=8", "algorithm.kl_coef=0.01", "rollout.num_groups=4"]
    options += ["rollout.group_size=4"]
    config = toy_config(toy_folder, *options)
    whole = build_run(config, tmp_path / "whole")
    success_rates(whole)
    for killed_at in (2, 3, 5, 7, 8):
        folder = tmp_path / f"killed_{killed_at}"
        first = build_run(config, folder)
        start(first)
        with pytest.raises(KeyboardInterrupt):
            train(first, _interrupt_at(killed_at))
        # What a kill can leave behind: a torn line and a half-written checkpoint.
        with (folder / "metrics.jsonl").open("a") as log:
            log.write('{"schema": 1, "st')
        (folder / "checkpoints" / ".writing_000099").mkdir(parents=True)
        second = build_run(config, folder, resume=True)
        resume(second)
        train(second)
        assert (folder / "metrics.jsonl").read_bytes() == (
            tmp_path / "whole" / "metrics.jsonl"
        ).read_bytes()
        theirs = weights_of(second)
        for name, tensor in weights_of(whole).items():
            assert torch.equal(tensor, theirs[name]), name


def _interrupt_at(step: int):
    def stop(record) -> None:
        if record.step == step:
            raise KeyboardInterrupt

    return stop


def test_a_run_without_any_variance_stops_and_says_why(toy_folder, tmp_path):
    config = toy_config(
        toy_folder, "filter.max_empty_steps=3", "filter.eps=1", "filter.rule=nonzero"
    )
    run = build_run(config, tmp_path / "run")
    start(run)
    assert "3 steps in a row had no group" in train(run)
    records = read_records(tmp_path / "run")
    assert [r["update/is_empty"] for r in records] == [1.0, 1.0, 1.0]


def test_overlong_replies_lose_up_to_one():
    assert [overlong_penalty(n, 100, 20) for n in (50, 80, 90, 100, 120)] == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(100, 100, 0) == 0


def test_lora_trains_adapters_only(toy_folder, tmp_path):
    torch.set_num_threads(1)
    config = toy_config(
        toy_folder,
        "algorithm.name=grpo",
        "optimizer.lora_rank=4",
        "num_steps=2",
        "filter.rule=none",
    )
    run = build_run(config, tmp_path / "run")
    before = {k: v.clone() for k, v in weights_of(run).items()}
    success_rates(run)
    changed = {k for k, v in weights_of(run).items() if not torch.equal(v, before[k])}
    assert changed and all("lora" in name for name in changed)


@pytest.mark.parametrize("advantage", ["gae", "bilevel_gae"])
def test_a_late_reward_teaches_the_first_turn_when_the_template_rewrites_history(
    rewriting_folder, tmp_path, advantage
):
    torch.set_num_threads(1)
    late = ["env=tests.e2e.toys:Late", "rollout.group_size=8", f"algorithm.advantage={advantage}"]
    late += [
        "num_steps=30",
        "optimizer.lr=1e-2",
        "optimizer.critic_lr=1.5e-2",
    ]
    rates = rates_until_solved(build_run(toy_config(rewriting_folder, *late), tmp_path))
    groups = read_groups(tmp_path / "rollouts" / "step_000001.parquet")
    # Each trajectory is in three pieces, unless a reply happens to begin like the rewritten one.
    assert len(build_samples(groups)) > 0.98 * 8 * 8 * 3
    assert np.mean(rates[:3]) < 0.3 and np.mean(rates[-5:]) > 0.9, rates
