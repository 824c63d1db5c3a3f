"""What the options do inside a run."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from moored.config import load_config
from moored.engine.local.learner import LocalLearner
from moored.presets import read_presets
from moored.runlog.log import read_records
from moored.train import Run, build_run, resume, start, train
from moored.training.samples import LossSample, overlong_penalty
from tests.e2e.toys import Logged, toy_config, weights_of

HERE = "tests.e2e.toys"
SMALL = ["rollout.group_size=4", "algorithm.name=grpo"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def run_to_end(run: Run) -> str:
    start(run)
    return train(run)


def column(folder, name: str) -> list:
    return [record.get(name) for record in read_records(folder)]


def test_the_learning_rate_follows_its_schedule_through_a_resumed_run(toy_folder, tmp_path):
    config = toy_config(
        toy_folder,
        *SMALL,
        "num_steps=6",
        "checkpoint_every=2",
        "filter.rule=none",
        "optimizer.lr=0.01",
        "optimizer.schedule=linear",
        "optimizer.warmup_steps=2",
        "optimizer.min_lr_ratio=0.2",
    )
    run_to_end(build_run(config, tmp_path / "whole"))
    rates = column(tmp_path / "whole", "learner/lr")
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.008, 0.006, 0.004])
    start(first := build_run(config, tmp_path / "stopped"))
    train(first, lambda record: record.step == 3)
    resume(second := build_run(config, tmp_path / "stopped", resume=True))
    train(second)
    assert (tmp_path / "stopped" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()


def test_a_mix_keeps_its_shares_in_every_step_and_groups_have_one_environment(toy_folder, tmp_path):
    Logged.played.clear()
    config = toy_config(
        toy_folder, *SMALL, "num_steps=6", f"env=[{HERE}:Logged, {HERE}:AlsoLogged]"
    )
    config = config.model_copy(
        update={"env": [config.env[0].model_copy(update={"weight": 3.0}), config.env[1]]}
    )
    run_to_end(build_run(config, tmp_path))
    assert len(Logged.played) == 6 * 8 * 4
    names_of = defaultdict(set)
    for name, task_seed in Logged.played:
        names_of[task_seed].add(name)
    assert len(names_of) == 6 * 8 and all(len(names) == 1 for names in names_of.values())
    for step in range(6):
        counts = Counter(name for name, _ in Logged.played[32 * step : 32 * step + 32])
        assert counts["logged"] + counts["also_logged"] == 32
        assert counts["also_logged"] in (4, 8, 12)  # two of eight groups, give or take one
    total = Counter(name for name, _ in Logged.played)
    assert total["also_logged"] in (44, 48, 52)


def test_low_variance_and_low_success_end_a_run_when_the_log_says_so(toy_folder, tmp_path):
    config = toy_config(toy_folder, *SMALL, "stop.low_variance=[1.0, 2]", "num_steps=60")
    assert "reward variance stayed below 100%" in run_to_end(
        build_run(config, tmp_path / "variance")
    )
    variances = column(tmp_path / "variance", "rollout/reward_variance_mean")
    is_low = [v < np.mean(variances[:10]) for v in variances[10:]]
    pairs = [a and b for a, b in pairwise(is_low)]
    assert pairs.index(True) == len(pairs) - 1  # the second low step in a row was the last
    config = toy_config(
        toy_folder,
        *SMALL,
        "stop.min_success=[1.0, 3]",
        "evaluation.every=2",
        "evaluation.num_tasks=8",
    )
    reason = run_to_end(build_run(config, tmp_path / "success"))
    assert reason == "validation success stayed below 100% for 3 evaluations"
    assert len(read_records(tmp_path / "success")) == 4  # evaluated at steps 1, 2, 4


def told_of_outcomes(folder) -> list:
    return [r for r in read_records(folder, "events") if r["kind"] == "outcome_free"]


def test_a_run_whose_updates_are_mostly_outcome_free_says_so_once(toy_folder, tmp_path, caplog):
    options = [*SMALL, f"env={HERE}:Priced", "num_steps=14", "collapse.every=0"]
    options += ["optimizer.lr=1e-6", "rollout.group_size=8", "checkpoint_every=12"]
    config = toy_config(toy_folder, *options, "filter.rule=none")
    # Stopped at step 11: the checkpoint knows the first ten shares, and the log what was said.
    start(first := build_run(config, tmp_path / "none"))
    train(first, lambda record: record.step == 11)
    resume(second := build_run(config, tmp_path / "none", resume=True))
    train(second)
    (told,) = told_of_outcomes(tmp_path / "none")
    shares = column(tmp_path / "none", "signal/outcome_free_share")
    assert (told["step"], told["outcome_free_share"]) == (10, pytest.approx(np.mean(shares[:10])))
    assert 0.5 < told["outcome_free_share"] < 1.0
    assert "algorithm.advantage=dr_grpo" in told["text"] and "filter.rule=top_p" in told["text"]
    assert [r.getMessage() for r in caplog.records].count(f"step 10: {told['text']}") == 1
    # Killed before its first checkpoint it does step 10 again, and does not say it again.
    shutil.rmtree(tmp_path / "none" / "checkpoints")
    resume(third := build_run(config, tmp_path / "none", resume=True))
    train(third)
    assert told_of_outcomes(tmp_path / "none") == [told]
    # With a remedy in place there is nothing to say.
    for remedy in ("filter.rule=top_p", "algorithm.advantage=dr_grpo"):
        cured = toy_config(toy_folder, *options, "filter.rule=none", remedy, "num_steps=11")
        run_to_end(build_run(cured, tmp_path / remedy))
        assert told_of_outcomes(tmp_path / remedy) == []


def record_updates(run: Run) -> list[list[LossSample]]:
    """Every minibatch the learner sees from now on."""
    seen: list[list[LossSample]] = []
    step = run.engine.learner.step

    def recording(minibatches, *, lr_factor=1.0):
        seen.extend(map(list, minibatches))
        return step(minibatches, lr_factor=lr_factor)

    run.engine.learner.step = recording
    return seen


def test_dapo_refills_constant_groups_and_shapes_overlong_replies(toy_folder, tmp_path):
    config = toy_config(
        toy_folder,
        f"env={HERE}:Half",
        "num_steps=2",
        "rollout.group_size=16",
        "algorithm.name=dapo",
        "algorithm.overlong_buffer=1",
        "filter.max_refills=6",
        "optimizer.num_minibatches=1",
    )
    run = build_run(config, tmp_path)
    updates = record_updates(run)
    run_to_end(run)
    assert min(column(tmp_path, "filter/num_groups")) > 8
    assert column(tmp_path, "filter/num_kept") == [8, 8]
    for samples in updates:
        rewards, shaped = defaultdict(list), defaultdict(list)
        for sample in (given.sample for given in samples):
            penalty = overlong_penalty(len(sample.ids_T), 2, 1)
            rewards[sample.group].append(sample.rewards_T.sum() - penalty)
            shaped[sample.group].append(sample.rewards_T.sum())
        assert len(rewards) == 8 and all(np.std(r) > 0 for r in rewards.values())
        for given in samples:
            sample = given.sample
            group = np.array(shaped[sample.group])
            expected = (sample.rewards_T.sum() - group.mean()) / (group.std() + 1e-6)
            assert given.advantages_T == pytest.approx(np.full(len(sample.ids_T), expected))


def test_mask_makes_no_update_where_nothing_was_kept(toy_folder, tmp_path):
    # One group of two is kept, one trajectory a minibatch: 4 of 8 updates have nothing to learn.
    config = toy_config(
        toy_folder,
        *SMALL,
        "num_steps=1",
        "rollout.num_groups=2",
        "filter.action=mask",
        "filter.rule=top_k_count",
        "filter.value=1",
        "filter.keep_zero=true",
        "optimizer.num_minibatches=8",
    )
    run = build_run(config, tmp_path)
    updates = record_updates(run)
    run_to_end(run)
    assert len(updates) == 4 == run.engine.learner.version
    assert column(tmp_path, "update/num_skipped") == [4.0]
    assert len({given.sample.group for part in updates for given in part}) == 1


def test_the_trajectory_baseline_trains_on_both_ends_of_every_group(toy_folder, tmp_path):
    config = toy_config(
        toy_folder, *SMALL, "num_steps=1", "filter.rule=none", "filter.best_and_worst=1"
    )
    run = build_run(config, tmp_path)
    updates = record_updates(run)
    run_to_end(run)
    counts = Counter(given.sample.group for samples in updates for given in samples)
    assert counts == dict.fromkeys(range(8), 2)


def test_kl_is_logged_and_grows_from_zero_when_on_and_costs_nothing_when_off(toy_folder, tmp_path):
    for coef in (0.0, 0.1):
        folder = tmp_path / str(coef)
        config = toy_config(
            toy_folder, *SMALL, "num_steps=2", "filter.rule=none", f"algorithm.kl_coef={coef}"
        )
        run = build_run(config, folder)
        run_to_end(run)
        assert isinstance(run.engine.learner, LocalLearner)
        assert (run.engine.learner.reference is None) == (coef == 0.0)
    first, second = column(tmp_path / "0.1", "learner/kl")
    # The first of two minibatches is scored before any update: only the second adds to the mean.
    assert 0.0 < first < second
    assert column(tmp_path / "0.0", "learner/kl") == [None, None]


def test_a_lora_run_resumes_bit_for_bit_and_two_runs_are_the_same(toy_folder, tmp_path):
    config = toy_config(
        toy_folder,
        "rollout.group_size=4",
        "num_steps=4",
        "checkpoint_every=2",
        "algorithm.name=ppo",
        "algorithm.kl_coef=0.01",
        "filter.rule=none",
        "optimizer.lora_rank=4",
        "engine.gradient_checkpointing=true",
    )
    run_to_end(whole := build_run(config, tmp_path / "whole"))
    start(first := build_run(config, tmp_path / "stopped"))
    train(first, lambda record: record.step == 3)
    resume(second := build_run(config, tmp_path / "stopped", resume=True))
    train(second)
    assert (tmp_path / "stopped" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()
    theirs = weights_of(second)
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, theirs[name]), name


def test_positions_chain_and_intervals_are_measured_in_a_run(tmp_path):
    config = load_config(
        read_presets(["smoke"]),
        [
            "num_steps=1",
            "evaluation.every=0",
            "rollout.num_groups=3",
            "rollout.group_size=2",
            "collapse.num_pairs=12",
            "collapse.bootstrap=20",
            "collapse.permutations=20",
            "collapse.views=[first_turn, observation_swap, trajectory, positions, chain]",
        ],
    )
    run_to_end(build_run(config, tmp_path))
    (look,) = map(json.loads, (tmp_path / "collapse.jsonl").read_text().splitlines())
    views = {"first_turn", "observation_swap", "trajectory", "turn_1", "turn_2"}
    assert set(look["reports"]) == views
    samples = ("first_turn_sample", "observation_swap_sample", "trajectory_sample")
    for prefix in (*samples, "turn_1", "turn_2"):
        assert look[f"collapse_{prefix}/mi_seq_estimate"] <= np.log(12) + 1e-9
        assert 0.0 <= look[f"collapse_{prefix}/retrieval_accuracy"] <= 1.0
    for name in ("state_action_mi", "reasoning_action_mi"):
        assert np.isfinite(look[f"collapse_chain/{name}"])
    assert look["skipped"] == {} and look["collapse/num_skipped_views"] == 0
    report = look["reports"]["first_turn"]
    interval = report["intervals"]["mi_estimate"]
    assert interval["low"] <= interval["high"]
    assert 0.0 < report["p_values"]["mi_estimate"] <= 1.0
