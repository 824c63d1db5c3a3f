"""Whole runs on a real Ray cluster of two nodes, with processes killed in mid-run.

The toy engine's weights depend on every token of every update, so equal metrics mean that nothing
was lost, doubled or written with other weights.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from moored.config import load_config
from moored.engine.base import Event
from moored.engine.build import build_engine
from moored.engine.ray.engine import RayEngine
from moored.runlog.log import read_records
from moored.runlog.rollouts import read_groups
from moored.train import Run, build_run, resume, start, train
from tests.e2e.toys import toy_config

pytest.importorskip("ray")

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
OPTIONS = [
    *("engine.kind=toy_cluster:ToyEngine", "engine.ray.replicas=2", "num_steps=5"),
    *("algorithm.name=grpo", "checkpoint_every=2", "collapse.every=0", "log.rollouts_every=0"),
    *("rollout.num_groups=4", "rollout.group_size=3", "rollout.max_response_tokens=6"),
    *("optimizer.num_minibatches=2", "filter.rule=none", "stop.low_variance=0"),
]


@pytest.fixture(autouse=True)
def slow_toys(monkeypatch):
    """Replies and updates that take long enough to be killed in."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("TOY_REPLY_S", "0.05")
    monkeypatch.setenv("TOY_UPDATE_S", "0.05")
    importlib.import_module("toy_cluster")


def config_for(ray_cluster, folder: Path, *more: str):
    words = [*OPTIONS, f"engine.ray.address={ray_cluster.address}", *more]
    return load_config({"env": "bandit", "model": str(folder)}, words)


def run_through(
    config, folder: Path, at_step: int = 0, act: Callable[[Run], None] | None = None
) -> list[dict[str, Any]]:
    """Train to the end; `act` in the background soon after a step."""
    run = build_run(config, folder)
    start(run)
    acting = []

    def on_step(record) -> None:
        if record.step == at_step and act is not None and not acting:
            acting.append(threading.Timer(0.03, act, [run]))
            acting[0].start()

    try:
        train(run, on_step)
    finally:
        run.close()
    return read_records(folder)


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, toy_folder, tmp_path_factory) -> list[dict[str, Any]]:
    """Metrics of a run that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return run_through(config_for(ray_cluster, toy_folder), tmp_path_factory.mktemp("run"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_killed_replica_changes_no_number(ray_cluster, toy_folder, tmp_path, undisturbed, caplog):
    def kill(run: Run) -> None:
        os.kill(run.engine.sampler.seats[0].about.pid, signal.SIGKILL)  # pyright: ignore

    found = run_through(config_for(ray_cluster, toy_folder), tmp_path / "run", 2, kill)
    assert found == undisturbed
    first = read_records(tmp_path / "run", "events")[0]
    assert first["kind"] == "replica_lost"
    assert {"step", "text", "replica", "pid", "node", "replies_again"} <= first.keys()
    assert "sampler replica 0 is lost" in caplog.text


def test_a_killed_environment_actor_costs_its_episodes_and_no_step(
    ray_cluster, toy_folder, tmp_path, undisturbed, caplog
):
    def kill(run: Run) -> None:
        os.kill(run.pool.actors[0].about.pid, signal.SIGKILL)  # pyright: ignore

    words = ["engine.ray.env_actors=1", "engine.ray.replicas=2"]
    found = run_through(config_for(ray_cluster, toy_folder, *words), tmp_path / "run", 2, kill)
    assert len(found) == len(undisturbed)
    assert found[:2] == undisturbed[:2], "environments in actors train the same"
    lost, back = read_records(tmp_path / "run", "events")
    assert (lost["kind"], back["kind"]) == ("env_actor_lost", "env_actor_back")
    assert {"step", "text", "env_actor", "pid", "node"} <= lost.keys()
    assert sum(record["rollout/error_count"] for record in found) == lost["episodes_lost"]
    assert "environment actor 0 is lost" in caplog.text
    (started,) = read_records(tmp_path / "run", "starts")
    assert "2 sampler replicas and 1 environment actor on 2 Ray nodes" in str(started["engine"])


def test_a_killed_learner_rank_restarts_the_step_from_the_last_checkpoint(
    ray_cluster, toy_folder, tmp_path, undisturbed
):
    def kill(run: Run) -> None:
        os.kill(run.engine.learner.team.pids[0], signal.SIGKILL)  # pyright: ignore

    found = run_through(config_for(ray_cluster, toy_folder), tmp_path / "run", 3, kill)
    assert found == undisturbed
    lost, back = read_records(tmp_path / "run", "events")
    assert (lost["kind"], back["kind"]) == ("learner_lost", "learner_back")
    # Step 3 was logged after the checkpoint of step 2, step 4 was under way; 12 episodes each.
    assert (back["steps_lost"], back["episodes_lost"]) == (2, 24)
    assert back["seconds_lost"] > 0.0  # pyright: ignore[reportOperatorIssue]


def test_weights_that_go_straight_to_replicas_change_no_number_whatever_dies(
    ray_cluster, toy_folder, tmp_path, undisturbed
):
    config = config_for(ray_cluster, toy_folder, "engine.ray.publish=direct")
    killed = []

    def kill(run: Run) -> None:
        team, seats = run.engine.learner.team, run.engine.sampler.seats  # pyright: ignore
        killed.append([seats[0].about.pid, team.pids[0]][len(killed)])
        os.kill(killed[-1], signal.SIGKILL)

    run = build_run(config, tmp_path / "run")
    start(run)
    train(run, lambda record: kill(run) if record.step in (1, 3) and len(killed) < 2 else None)
    run.close()
    assert read_records(tmp_path / "run") == undisturbed
    kinds = [event["kind"] for event in read_records(tmp_path / "run", "events")]
    assert kinds.count("replica_lost") >= 1
    assert (kinds.count("learner_lost"), kinds.count("learner_back")) == (1, 1)


def test_under_auto_replicas_give_their_place_back_to_a_lost_learner(ray_cluster, toy_folder):
    words = ["engine.ray.replicas=auto", "engine.ray.patience_s=30"]
    events: list[Event] = []
    with closing(build_engine(config_for(ray_cluster, toy_folder, *words))) as engine:
        assert isinstance(engine, RayEngine)
        engine.on_event = events.append
        engine.learner.team.close()
        # Two nodes with 2 CPUs each, and no learner.
        while len(engine.sampler.up) < 4:
            engine.sampler.grow()
            engine.sampler.look_after(wait_s=0.2)
        engine.restart_learner()
        assert len(engine.sampler.seats) == 3
        assert engine.learner.team.call("damaged_weights") == [[]]
    assert [event.kind for event in events[-2:]] == ["learner_lost", "replica_ended"]
    assert events[-1].text == "sampler replica 3 made room for a learner rank"


def test_a_lost_node_changes_no_number(ray_cluster, toy_folder, tmp_path, undisturbed):
    node = ray_cluster.add_node(num_cpus=2, object_store_memory=100_000_000)

    def lose(run: Run) -> None:
        ray_cluster.remove_node(node, allow_graceful=False)

    config = config_for(ray_cluster, toy_folder, "engine.ray.replicas=3")
    found = run_through(config, tmp_path / "run", 1, lose)
    assert found == undisturbed


def test_a_killed_driver_leaves_no_actor_and_is_resumed(
    ray_cluster, toy_folder, tmp_path, undisturbed
):
    folder = tmp_path / "run"
    config = config_for(ray_cluster, toy_folder, "engine.ray.env_actors=1")
    script = tmp_path / "drive.py"
    script.write_text(
        "import sys\n"
        "from moored.config import Config\n"
        "from moored.train import build_run, start, train\n"
        "run = build_run(Config.model_validate_json(sys.argv[1]), sys.argv[2])\n"
        "start(run)\n"
        "seats = [*run.engine.sampler.seats, *run.pool.actors]\n"
        "pids = [seat.about.pid for seat in seats]\n"
        "print(*run.engine.learner.team.pids, *pids, flush=True)\n"
        "train(run, lambda record: print(record.step, flush=True))\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    driver = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), config.model_dump_json(), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    while driver.stdout.readline() != "3\n":
        pass
    driver.kill()
    driver.communicate()
    deadline_s = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))
    run = build_run(config, folder, resume=True)
    resume(run)
    assert run.next_step == 3
    train(run)
    run.close()
    assert read_records(folder) == undisturbed
    (back,) = read_records(folder, "events")
    assert (back["kind"], back["steps_lost"], back["episodes_lost"]) == ("driver_back", 1, 12)


def versions(folder: Path) -> list[int]:
    """Of the weights that the groups of each step were written with."""
    files = sorted((folder / "rollouts").glob("*.parquet"))
    return [read_groups(file)[0].trajectories[0].turns[0].policy_version for file in files]


def test_with_a_lag_groups_are_written_beside_updates_and_a_resumed_run_is_the_same(
    ray_cluster, toy_folder, tmp_path
):
    words = ["rollout.max_lag=1", "log.rollouts_every=1"]
    config, whole = config_for(ray_cluster, toy_folder, *words), tmp_path / "whole"
    found = run_through(config, whole)
    # Two updates each step: those of step 3 were made with the weights after step 1.
    assert versions(whole) == [0, 0, 2, 4, 6]
    times = read_records(whole, "timing")
    assert ["rollout_beside_s" in record for record in times] == [True] * 4 + [False]
    run = build_run(config, tmp_path / "parts")
    start(run)
    train(run, lambda record: record.step == 3)
    run.close()
    run = build_run(config, tmp_path / "parts", resume=True)
    resume(run)
    assert run.next_step == 4
    train(run)
    run.close()
    assert read_records(tmp_path / "parts") == found
    assert versions(tmp_path / "parts") == versions(whole)


def test_one_rank_and_one_replica_train_as_one_process_does(
    ray_cluster, toy_folder, tmp_path, here
):
    words = ["num_steps=2", "rollout.num_groups=2", "rollout.group_size=4"]
    at = [f"engine.ray.address={ray_cluster.address}", "engine.kind=ray"]
    at.append("engine.ray.env_actors=2")
    found = [
        run_through(toy_config(toy_folder, *words, *where), tmp_path / str(number))
        for number, where in enumerate(([], at, [*at, "engine.ray.publish=direct"]))
    ]
    assert found[0] == found[1] == found[2]
    assert (tmp_path / "1" / "model" / "model.safetensors").exists()
    # The run is evaluated in this process: its cluster may be gone by then.
    assert "on 2 tasks" in here("eval", tmp_path / "1", "-n", "2")
