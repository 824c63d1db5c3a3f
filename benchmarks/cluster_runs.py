"""Whole runs of the bottle on a Ray cluster of several nodes, against one process, over seeds.

    python benchmarks/cluster_runs.py seeds FOLDER [--seeds 8] [--steps 20] [--out FILE]
    python benchmarks/cluster_runs.py lag FOLDER [--seeds 3] [--steps 100] [--out FILE]

`seeds`: two learner ranks and two replicas against one process, by paired figures of the same
seeds (`paired.py`). `lag`: with and without the filter, at a lag of 0 and of 1, where each run
ended. One rank and one replica at a lag of 0 have the numbers of one process (`cluster.py same`),
so those runs are made without Ray. Runs stay in FOLDER; one that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from cluster import Nodes
from harness import describe_machine, make_console
from paired import compare_runs, show_compared

from moored.runlog.log import read_records

CLUSTER = ["engine.kind=ray", "engine.ray.learners=2", "engine.ray.replicas=2"]
LAG = ["engine.kind=ray", "rollout.max_lag=1"]
ARMS = {
    "seeds": {"local": [], "cluster": CLUSTER},
    "lag": {
        "no filter, lag 0": ["no_filter"],
        "no filter, lag 1": ["no_filter", *LAG],
        "filter, lag 0": [],
        "filter, lag 1": LAG,
    },
}
SIZES = {"seeds": (8, 20), "lag": (3, 100)}
"""Seeds and steps."""
VIEW = "collapse_first_turn_sample"


def train(words: Sequence[str], folder: Path, num_steps: int) -> None:
    """One run in a process of its own, on one thread, unless it is there."""
    if folder.exists() and len(read_records(folder)) >= num_steps:
        return
    options = ["collapse", *words, "engine.device=cpu", f"num_steps={num_steps}"]
    options += ["log.rollouts_every=0", "--no-report", "--run", str(folder)]
    command = [sys.executable, "-c", "from moored.cli.main import main; main()", "train", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"moored {' '.join(command[3:])} failed:\n{done.stdout}{done.stderr}")


def run_arms(what: str, folder: Path, num_seeds: int, num_steps: int) -> list[dict[str, Path]]:
    """The run of every arm, by seed."""
    nodes, found = Nodes(3), []
    for seed in range(num_seeds):
        runs = {}
        for arm, words in ARMS[what].items():
            runs[arm] = folder / f"{arm.replace(', ', '_').replace(' ', '_')}_seed_{seed}"
            address = [f"engine.ray.address={nodes.address}"] if "engine.kind=ray" in words else []
            looks = ["collapse.every=2"] if what == "seeds" else []
            train([*words, *address, *looks, f"seed={seed}"], runs[arm], num_steps)
            print(f"seed {seed}, {arm}: done", flush=True)
        found.append(runs)
    nodes.close()
    return found


def where_ended(folder: Path) -> dict[str, float]:
    """MI and entropy of the first look and of the last three, success over the last 20 steps."""
    metrics, looks = read_records(folder), read_records(folder, "collapse")
    found = {}
    for name in ("mi_estimate", "conditional_entropy_est"):
        values: list[Any] = [look[f"{VIEW}/{name}"] for look in looks]
        found |= {f"{name}_first": values[0], f"{name}_last_3": fmean(values[-3:])}
    successes: list[Any] = [record["rollout/success_rate"] for record in metrics[-20:]]
    found["success_last_20"] = fmean(successes)
    return {name: round(value, 4) for name, value in found.items()}


def summarize_lag(pairs: Sequence[Mapping[str, Path]]) -> dict[str, object]:
    """Where every run ended, and the mean over seeds."""
    found: dict[str, object] = {}
    for arm in pairs[0]:
        by_seed = [where_ended(runs[arm]) for runs in pairs]
        means = {name: round(fmean(run[name] for run in by_seed), 4) for name in by_seed[0]}
        found[arm] = {"mean": means, "by_seed": by_seed}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=tuple(ARMS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="A JSON file; figures of other commands stay.")
    options = parser.parse_args(arguments)
    num_seeds = options.seeds or SIZES[options.what][0]
    num_steps = options.steps or SIZES[options.what][1]
    pairs = run_arms(options.what, options.folder.resolve(), num_seeds, num_steps)
    figures = compare_runs(pairs) if options.what == "seeds" else summarize_lag(pairs)
    console = make_console()
    if options.what == "seeds":
        show_compared(console, compare_runs(pairs))
    else:
        console.print_json(json.dumps(figures))
    if options.out is not None:
        stored = json.loads(options.out.read_text()) if options.out.exists() else {}
        machine = describe_machine(torch.device("cpu"), bf16=False)
        size = {"num_seeds": num_seeds, "num_steps": num_steps}
        stored[options.what] = {**machine, **size, "figures": figures}
        options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
