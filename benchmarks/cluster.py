"""Runs on a real Ray cluster of several nodes on this machine, and what they survive.

    python benchmarks/cluster.py kills [--engine toy nano] [--times 10] [--publish direct] …
    python benchmarks/cluster.py overlap [--out FILE]
    python benchmarks/cluster.py same [--out FILE]
    python benchmarks/cluster.py driver [--out FILE]

`kills`: for each kind of process (replica, env_actor, learner, driver, node) one run in which it is
killed with SIGKILL `--times` times, each at a random moment a few steps after it has come back.
Then the same steps without a kill, with environments in the driver: metrics have to be equal, and
every kill has to be in `events.jsonl`. Only an env_actor takes episodes with it: as many have to
end in an error as its events name. With `--publish direct` weights go straight to replicas in
the runs with kills, and through the store in those without.
`toy` is the engine of `toy_cluster.py` with two replicas; `nano` the embedded model with one, since
replies of several are equal up to rounding only. `overlap`: seconds of a step whose rollout and
update take 0.4 s each, with and without `rollout.max_lag`. `same`: five steps of `nano` on the
cluster and in one process. `driver`: turns a second with four replicas that cost nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import describe_machine, make_console
from ray.cluster_utils import Cluster

from moored.cli.options import read_config
from moored.config import Config
from moored.runlog.log import read_records
from moored.train import Run, build_run, resume, start, train, train_step

HERE = Path(__file__).parent
NODE = {"num_cpus": 2, "object_store_memory": 100_000_000}
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 20_000,
    "health_check_failure_threshold": 4,
}
"""A lost node is noticed within seconds, and a busy one is not taken for lost."""
BASE = [
    *("num_steps=2000", "checkpoint_every=4", "collapse.every=0", "log.rollouts_every=0"),
    *("evaluation.every=0", "filter.rule=none", "stop.low_variance=0", "stop.min_success=0"),
    *("rollout.num_groups=4", "rollout.group_size=4", "rollout.max_response_tokens=8"),
    *("algorithm.name=grpo", "optimizer.num_minibatches=2", "model=nano"),
]
ENGINES = {
    "toy": ["engine.kind=toy_cluster:ToyEngine", "engine.ray.replicas=2", "env=bandit"],
    "nano": ["engine.kind=ray", "env={name: sokoban, options: {max_turns: 1}}"],
}
MOMENT_S = {"toy": 0.5, "nano": 2.0}
"""A kill comes within so many seconds: about two steps."""
MOST_STEPS = 8
"""Whole steps between a return and the next kill, at most; checkpoints are four steps apart."""
KINDS = ("replica", "env_actor", "learner", "driver", "node")
LOST = {"env_actor": "env_actor_lost", "learner": "learner_lost", "driver": "driver_back"}
DRIVER = """
import sys
from moored.config import Config
from moored.train import build_run, resume, start, train
config, goes_on = Config.model_validate_json(sys.argv[1]), sys.argv[3] == "resume"
run = build_run(config, sys.argv[2], resume=goes_on)
resume(run) if goes_on else start(run)
print("up", flush=True)
train(run, lambda record: print(record.step, flush=True))
"""


class Nodes:
    """A cluster whose first node has no CPUs: all actors are on nodes that can be lost."""

    def __init__(self, count: int) -> None:
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": QUICK}
        )
        self._count = count
        self.nodes: list[Any] = []
        self.refill()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def refill(self) -> None:
        """As many nodes as there were; from the main thread, since Ray sets signal handlers."""
        while len(self.nodes) < self._count:
            self.nodes.append(self.cluster.add_node(**NODE))  # pyright: ignore

    def lose(self, node_id: str) -> None:
        """End a node with SIGKILL."""
        node = next(node for node in self.nodes if node.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()


def make_config(engine: str, address: str, *more: str) -> Config:
    return read_config([*BASE, *ENGINES[engine], f"engine.ray.address={address}", *more])


def kill_one(kind: str, run: Run, nodes: Nodes, rng: random.Random) -> None:
    """SIGKILL a process of a run, or the node of one."""
    engine: Any = run.engine
    known = {node.node_id for node in nodes.nodes}
    # One that was on a lost node may not be known to be lost yet.
    seat = rng.choice([seat for seat in engine.sampler.seats if seat.about.node in known])
    if kind == "replica":
        os.kill(seat.about.pid, signal.SIGKILL)
    elif kind == "env_actor":
        pool: Any = run.pool
        os.kill(rng.choice(pool.actors).about.pid, signal.SIGKILL)
    elif kind == "learner":
        os.kill(rng.choice(engine.learner.team.pids), signal.SIGKILL)
    else:
        nodes.lose(seat.about.node)


class Killer:
    """Kills at random moments, each time after what died is back and a step was done since."""

    def __init__(self, kill: Callable[[], None], times: int, within_s: float, seed: int) -> None:
        self._kill, self._times, self._within_s = kill, times, within_s
        self._rng = random.Random(seed)
        self.num_kills = 0
        self.lost_s: list[float] = []
        self._killed_at_s: float | None = None
        self._timer: threading.Timer | None = None
        self._steps_left = 0

    def on_step(self, is_whole: bool) -> bool:
        """Called after every step; True once there is nothing left to kill."""
        if self._timer is not None and self._timer.is_alive():
            return False
        if not is_whole:
            return False
        if self._killed_at_s is not None:
            self.lost_s.append(time.monotonic() - self._killed_at_s)
            self._killed_at_s = None
            self._steps_left = self._rng.randrange(MOST_STEPS)
        if self.num_kills == self._times:
            return True
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        self._timer = threading.Timer(self._rng.uniform(0.0, self._within_s), self._strike)
        self._timer.start()
        return False

    def _strike(self) -> None:
        self._kill()
        self.num_kills += 1
        self._killed_at_s = time.monotonic()


def run_with_kills(
    kind: str, config: Config, folder: Path, nodes: Nodes, times: int, within_s: float
):
    """One run in this process; what it was killed with, and how long until the next whole step."""
    rng = random.Random(kind)
    run = build_run(config, folder)
    start(run)
    killer = Killer(lambda: kill_one(kind, run, nodes, rng), times, within_s, seed=1)

    def on_step(record: object) -> bool:
        engine: Any = run.engine
        nodes.refill()
        counts = Counter(r["kind"] for r in read_records(folder, "events"))
        # A kill between two calls is noticed with the next one.
        noticed = counts[LOST.get(kind, "replica_lost")] + counts["learner_lost"] * (kind == "node")
        pool: Any = run.pool
        seats = [*engine.sampler.seats, *(pool.actors if kind == "env_actor" else ())]
        return killer.on_step(all(seat.is_up for seat in seats) and noticed >= killer.num_kills)

    try:
        train(run, on_step)
    finally:
        run.close()
    return killer


def run_with_killed_drivers(config: Config, folder: Path, times: int, within_s: float) -> Killer:
    """Drivers in processes of their own, each killed some time after its first step."""
    rng = random.Random("driver")
    killer = Killer(lambda: None, times, within_s, seed=1)
    for number in range(times):
        how = "start" if number == 0 else "resume"
        command = [sys.executable, "-W", "ignore", "-c", DRIVER, config.model_dump_json()]
        driver = subprocess.Popen(
            [*command, str(folder), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])},
        )
        assert driver.stdout is not None
        lines = iter(driver.stdout.readline, "")
        if next(lines, "") != "up\n" or not next(lines, ""):
            raise SystemExit(f"a driver ended by itself: {driver.communicate()[1][-2000:]}")
        for _ in range(rng.randrange(MOST_STEPS)):
            next(lines, "")
        time.sleep(rng.uniform(0.0, within_s))
        driver.kill()
        driver.communicate()
        killer.num_kills += 1
    run = build_run(config, folder, resume=True)
    resume(run)
    train(run, lambda record: True)
    run.close()
    return killer


def undisturbed(config: Config, folder: Path, num_steps: int) -> list[dict[str, object]]:
    run = build_run(config, folder)
    start(run)
    train(run, lambda record: record.step == num_steps)
    run.close()
    return read_records(folder)


def measure_kills(engine: str, kind: str, times: int, publish: str) -> dict[str, object]:
    """Kills of one kind of process, and whether numbers and log are whole."""
    os.environ |= {"TOY_REPLY_S": "0.05", "TOY_UPDATE_S": "0.05"}
    nodes, begun_s = Nodes(3), time.monotonic()
    words = ["engine.ray.env_actors=2"] if kind == "env_actor" else []
    config = make_config(engine, nodes.address, f"engine.ray.publish={publish}", *words)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if kind == "driver":
            killer = run_with_killed_drivers(config, folder, times, MOMENT_S[engine])
        else:
            killer = run_with_kills(kind, config, folder, nodes, times, MOMENT_S[engine])
        seconds = time.monotonic() - begun_s
        metrics, events = read_records(folder), read_records(folder, "events")
        plain_config = make_config(engine, nodes.address)
        plain = undisturbed(plain_config, Path(parent) / "plain", len(metrics))
    nodes.close()
    found = {
        "num_kills": killer.num_kills,
        "num_steps": len(metrics),
        "equals_undisturbed": metrics == plain,
        "events": dict(Counter(str(record["kind"]) for record in events)),
        "episodes_lost": sum(int(r.get("episodes_lost", 0)) for r in events),  # pyright: ignore
        "replies_again": sum(int(r.get("replies_again", 0)) for r in events),  # pyright: ignore
        "episodes_with_error": sum(int(r["rollout/error_count"]) for r in metrics),  # pyright: ignore
        "seconds": round(seconds, 1),
    }
    if killer.lost_s:
        found["median_seconds_to_a_whole_step"] = round(median(killer.lost_s), 2)
    print(engine, kind, json.dumps(found), flush=True)
    return found


def measure_overlap() -> dict[str, object]:
    """Median seconds of a step: replies 0.4 s, two updates of 0.2 s."""
    os.environ |= {"TOY_REPLY_S": "0.4", "TOY_UPDATE_S": "0.2"}
    nodes, found = Nodes(2), {}
    for max_lag in (0, 1):
        config = make_config("toy", nodes.address, f"rollout.max_lag={max_lag}", "num_steps=20")
        with tempfile.TemporaryDirectory() as parent:
            run, marks = build_run(config, Path(parent) / "run"), [time.monotonic()]
            start(run)
            train(run, lambda record, marks=marks: marks.append(time.monotonic()))
            run.close()
            seconds = [after - before for before, after in itertools.pairwise(marks[2:])]
            found[f"max_lag={max_lag}"] = {"median_step_s": round(median(seconds), 3)}
        print(max_lag, found, flush=True)
    nodes.close()
    return found


def measure_same() -> dict[str, object]:
    """Five steps of nano: local, one replica, and two ranks with two replicas."""
    nodes = Nodes(3)
    sides = {
        "local": ["engine.kind=local"],
        "1 rank, 1 replica": [],
        "2 ranks, 2 replicas": ["engine.ray.learners=2", "engine.ray.replicas=2"],
    }
    found: dict[str, list[dict[str, object]]] = {}
    for name, words in sides.items():
        config = make_config("nano", nodes.address, *words, "num_steps=5")
        with tempfile.TemporaryDirectory() as parent:
            found[name] = undisturbed(config, Path(parent) / "run", 5)
    nodes.close()
    names = ("rollout/reward_mean", "learner/policy_loss", "learner/grad_norm")
    return {
        "equal": found["local"] == found["1 rank, 1 replica"],
        "steps": {side: [{n: r[n] for n in names} for r in rs] for side, rs in found.items()},
    }


def measure_driver() -> dict[str, object]:
    """Rollouts of 1,024 episodes of five turns at a time; replies and updates cost nothing."""
    os.environ |= {"TOY_REPLY_S": "0", "TOY_UPDATE_S": "0"}
    words = ["env=sokoban", "engine.ray.replicas=4", "rollout.max_response_tokens=40"]
    words += ["rollout.num_groups=64", "rollout.group_size=16"]
    nodes, rates = Nodes(3), []
    with tempfile.TemporaryDirectory() as parent:
        run = build_run(make_config("toy", nodes.address, *words), Path(parent) / "run")
        start(run)
        for step in range(1, 9):
            record = train_step(run, step)
            num_turns = 1024 * record.metrics["rollout/turns_mean"]
            rates.append(num_turns / record.seconds["rollout"])
        run.close()
    nodes.close()
    return {"turns_per_s": round(median(rates[2:])), "each_step": [round(rate) for rate in rates]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "overlap", "same", "driver"))
    parser.add_argument("--engine", nargs="+", default=["toy", "nano"], choices=tuple(ENGINES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--publish", default="store", choices=("store", "direct"))
    parser.add_argument("--out", type=Path, help="A JSON file; figures of other commands stay.")
    options = parser.parse_args(arguments)
    if options.what == "kills":
        found = {
            f"kills, {engine}, {kind}{', direct' if options.publish == 'direct' else ''}": (
                measure_kills(engine, kind, options.times, options.publish)
            )
            for engine in options.engine
            for kind in options.kinds
        }
    elif options.what == "overlap":
        found = {"overlap": measure_overlap()}
    elif options.what == "driver":
        found = {"driver": measure_driver()}
    else:
        found = {"same": measure_same()}
    make_console().print_json(json.dumps(found))
    if options.out is not None:
        stored = json.loads(options.out.read_text()) if options.out.exists() else {}
        machine = describe_machine(torch.device("cpu"), bf16=False)
        stored |= {name: {**machine, "figures": figures} for name, figures in found.items()}
        options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
