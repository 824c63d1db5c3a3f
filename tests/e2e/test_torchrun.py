"""`engine.kind=torchrun`: the same run on several ranks, all of them real processes on gloo."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moored.runlog.log import read_records
from moored.runlog.rollouts import read_groups
from moored.types import Turn
from tests.ranks import finish_ranks, start_ranks
from tests.warm import WarmProcess, run_warm

pytestmark = pytest.mark.cluster

TINY = ["rollout.num_groups=3", "rollout.group_size=4", "rollout.max_response_tokens=3"]
TINY += ["rollout.max_context=64", "evaluation.every=0", "stop.low_variance=0", "engine.device=cpu"]
TINY += ["num_steps=5", "collapse.every=0", "log.rollouts_every=1", "optimizer.lr=0.001"]
TORCHRUN = "engine.kind=torchrun"
PPO = ["algorithm.name=ppo", "algorithm.kl_coef=0.1", "optimizer.critic_lr=0.001"]


def words(model: Path, *options: str) -> list[str]:
    env = "env=tests.e2e.toys:Late"
    return ["train", f"model={model}", env, *TINY, *PPO, *options, "--no-report"]


def run_alone(folder: Path, words: list[str]) -> Path:
    found = run_warm([*words, "--run", "alone"], cwd=folder)
    assert found.returncode == 0, found.stderr
    return folder / "alone"


def run_ranks(size: int, folder: Path, words: list[str]) -> Path:
    name = f"ranks_{size}"
    finish_ranks(start_ranks(size, [*words, TORCHRUN, "--run", name], cwd=folder))
    return folder / name


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics, looks at collapse, rollouts and weights are those of the other run."""
    for stream in ("metrics", "collapse"):
        for left, right in zip(read_records(one, stream), read_records(other, stream), strict=True):
            numbers, texts = split_record(left)
            other_numbers, other_texts = split_record(right)
            assert numbers == pytest.approx(other_numbers, rel=1e-5, abs=1e-5)
            assert texts == other_texts
    for file in sorted((one / "rollouts").iterdir()):
        pairs = zip(turns(file), turns(other / "rollouts" / file.name), strict=True)
        for left, right in pairs:
            assert left.completion_ids.tolist() == right.completion_ids.tolist()
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)
    weights = [load_file(run / "model" / "model.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0.0, atol=1e-5)


def split_record(record: object, path: str = "") -> tuple[dict[str, float], dict[str, object]]:
    """The numbers of a record and all else, by their path."""
    if isinstance(record, float | int) and not isinstance(record, bool):
        return {path: float(record)}, {}
    if not isinstance(record, dict | list):
        return {}, {path: record}
    numbers, others = {}, {}
    for key, value in record.items() if isinstance(record, dict) else enumerate(record):
        found = split_record(value, f"{path}/{key}")
        numbers |= found[0]
        others |= found[1]
    return numbers, others


def turns(file: Path) -> list[Turn]:
    groups = read_groups(file)
    return [turn for group in groups for member in group.trajectories for turn in member.turns]


def wait_for_steps(run: Path, count: int, ranks: list[WarmProcess]) -> None:
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert ranks[0].poll() is None, ranks[0].communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(toy_folder, tmp_path_factory) -> Path:
    """Five steps of policy and critic in one process."""
    return run_alone(tmp_path_factory.mktemp("alone"), words(toy_folder))


def test_three_ranks_train_policy_and_critic_as_one_process_does(toy_folder, alone, tmp_path):
    assert_same_run(run_ranks(3, tmp_path, words(toy_folder)), alone)


def test_a_single_rank_is_the_engine_of_one_process(toy_folder, alone, tmp_path):
    run = run_ranks(1, tmp_path, words(toy_folder))
    assert (run / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()


def test_two_ranks_measure_collapse_of_three_groups_and_one_has_none_to_train_on(tmp_path):
    # One group of two is kept, and each of its samples is an update: one rank has nothing in it.
    chosen = ["filter.rule=top_k_count", "filter.value=1", "rollout.group_size=2"]
    asked = ["train", "bandit", "grpo", "model=nano", *TINY, *chosen, "--no-report"]
    asked += ["collapse.every=2", "rollout.max_response_tokens=32", "rollout.max_context=512"]
    asked += ["optimizer.lr=0.0001", "num_steps=3"]
    alone = run_alone(tmp_path, asked)
    assert_same_run(run_ranks(2, tmp_path, asked), alone)
    assert any("retrieval" in name for name in split_record(read_records(alone, "collapse"))[0])


def test_a_run_goes_on_with_another_number_of_ranks(toy_folder, alone, tmp_path):
    run = run_ranks(2, tmp_path, words(toy_folder, "num_steps=2"))
    go_on = ["train", "--resume", run, "--no-report"]
    # Three ranks read what two wrote, one process what three wrote, one rank what it wrote.
    finish_ranks(start_ranks(3, [*go_on, "num_steps=3"], cwd=tmp_path))
    found = run_warm([*go_on, "num_steps=4", "engine.kind=local"], cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    out, _ = finish_ranks(start_ranks(1, [*go_on, "num_steps=5", TORCHRUN], cwd=tmp_path))
    assert "changed: engine.kind from local to torchrun\n" in out and "1 rank\n" in out
    assert_same_run(run, alone)
    asked = ["eval", run, "-n", "6"]
    in_one = run_warm(asked, cwd=tmp_path)
    assert finish_ranks(start_ranks(2, asked, cwd=tmp_path)) == (in_one.stdout, in_one.stderr)
    assert in_one.stdout.startswith("success")


def test_a_killed_rank_ends_all_with_one_sentence_and_the_run_goes_on(toy_folder, tmp_path):
    asked = words(toy_folder, "num_steps=5000", "checkpoint_every=1", "log.rollouts_every=0")
    ranks = start_ranks(3, [*asked, TORCHRUN, "--run", "run"], cwd=tmp_path)
    wait_for_steps(tmp_path / "run", 2, ranks)
    ranks[1].kill()
    ranks[1].communicate()
    _, said = ranks[0].communicate()
    assert ranks[0].returncode == 2
    assert said.startswith("moored: rank 1 failed: it was killed") and said.count("\n") == 1
    assert ranks[2].communicate() == ("", "") and ranks[2].returncode == 1
    done = int(str(read_records(tmp_path / "run")[-1]["step"]))
    again = ["train", "--resume", "run", f"num_steps={done + 1}", "--no-report"]
    finish_ranks(start_ranks(2, again, cwd=tmp_path))
    assert [record["step"] for record in read_records(tmp_path / "run")] == [*range(1, done + 2)]


def test_a_follower_that_is_asked_to_stop_ends_all_after_the_step(toy_folder, tmp_path):
    asked = words(toy_folder, "num_steps=5000", "log.rollouts_every=0")
    ranks = start_ranks(2, [*asked, TORCHRUN, "--run", "run"], cwd=tmp_path)
    wait_for_steps(tmp_path / "run", 2, ranks)
    ranks[1].send_signal(signal.SIGTERM)
    out, said = ranks[0].communicate()
    assert ranks[0].returncode == 143 and "stopping after this step" in said
    assert "go on with: torchrun --nproc-per-node 2 -m -- moored train --resume run\n" in out
    assert ranks[1].communicate() == ("", "") and ranks[1].returncode == 0
    done = int(str(read_records(tmp_path / "run")[-1]["step"]))
    assert (tmp_path / "run" / "checkpoints" / f"step_{done:06d}").is_dir()


def test_a_command_without_an_engine_lets_the_other_ranks_go(tmp_path):
    out, _ = finish_ranks(start_ranks(2, ["presets"], cwd=tmp_path))
    assert "bandit" in out


@pytest.mark.parametrize(
    ("size", "options", "why"),
    [
        (4, [TORCHRUN], "4 ranks share 3 groups"),
        (2, ["engine.kind=local"], "torchrun started 2 ranks, but engine.kind is local"),
        (
            2,
            [TORCHRUN, "engine.compile=true"],
            "engine.compile = True works with engine.kind=local",
        ),
        (2, [TORCHRUN, "engine.device=cuda"], "2 ranks were started on this machine, which has 0"),
    ],
)
def test_ranks_that_cannot_work_are_refused_before_they_meet(
    toy_folder, tmp_path, monkeypatch, size, options, why
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Followers wait for the driver, as they would for torchrun to end them.
    driver, *others = start_ranks(
        size, [*words(toy_folder), *options, "--run", "run"], cwd=tmp_path
    )
    _, said = driver.communicate()
    for follower in others:
        follower.kill()
        follower.communicate()
    assert driver.returncode == 2
    assert said.startswith(f"moored: {why}") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_torchrun_without_its_variables_says_how_to_start(toy_folder, tmp_path):
    found = run_warm([*words(toy_folder), TORCHRUN, "--run", "run"], cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr.startswith("moored: engine.kind=torchrun needs the variables")
    assert "torchrun --nproc-per-node" in found.stderr and found.stderr.count("\n") == 1


def test_a_port_in_use_is_one_sentence(toy_folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asked = [*words(toy_folder), TORCHRUN, "--run", "run"]
        rank, other = start_ranks(2, asked, cwd=tmp_path, port=port)
        _, said = rank.communicate()
        other.kill()
        other.communicate()
    assert said.startswith(f"moored: port {port} of 127.0.0.1, where ranks should meet, is in use")
    assert rank.returncode == 2 and said.count("\n") == 1
