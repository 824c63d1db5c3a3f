"""Do ranks of torchrun compute what one process computes, and do they all end when one dies?

    python benchmarks/ranks.py [--sizes 2 3] [--cases grpo ppo …] [--kills 3] [--out FILE]

Real torchrun on CPUs (gloo) with the embedded model `nano`, five steps each. For every case one
process trains, then ranks do; printed are the largest differences of metrics, looks at collapse and
weights, and whether all replies are the same. `resume` is a run whose number of ranks changes. A
kill is SIGKILL of a random rank at a random moment; all processes have to end, and the run goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import describe_machine, make_console, show_machine, write_record
from safetensors.torch import load_file

from moored.runlog.log import read_records
from moored.runlog.rollouts import read_groups

BASE = ["model=nano", "engine.device=cpu", "num_steps=5", "rollout.num_groups=3"]
BASE += ["rollout.group_size=4", "rollout.max_response_tokens=32", "evaluation.every=0"]
BASE += ["stop.low_variance=0", "log.rollouts_every=1", "collapse.every=2", "--no-report"]
CASES = {
    "grpo": ["bandit", "grpo", "algorithm.kl_coef=0.01"],
    "ppo": ["bandit", "ppo", "algorithm.kl_coef=0.01"],
    "lora": ["bandit", "ppo", "optimizer.lora_rank=4", "algorithm.kl_coef=0.01"],
    "checkpointing": ["bandit", "grpo", "engine.gradient_checkpointing=true"],
    "plain": ["bandit", "grpo", "engine.sampler=plain", "engine.learner=plain"],
    "turns": ["frozen_lake", "grpo", "rollout.max_context=1024"],
    "one group kept": ["bandit", "grpo", "filter.rule=top_k_count", "filter.value=1"],
}
STEP_S = 0.05


def start(size: int, words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """`moored words…` in one process (size 0) or on ranks, in a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    torchrun += ["--master-port", str(port)]
    program = [*torchrun, "-m", "--", "moored"] if size else ["-m", "moored"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *program, *words], cwd=folder, env=env, stdout=log, stderr=log
        )


def run(size: int, words: Sequence[str], folder: Path) -> None:
    if start(size, words, folder).wait():
        raise SystemExit((folder / "log").read_text()[-4000:])


def train(size: int, case: str, folder: Path) -> Path:
    kind = ["engine.kind=torchrun"] if size else []
    name = f"{case.replace(' ', '_')}_{size}"
    run(size, ["train", *CASES[case], *BASE, *kind, "--run", name], folder)
    return folder / name


def resume_elsewhere(sizes: Sequence[int], folder: Path) -> Path:
    """Steps 1 and 2 on the first number of ranks, then two on the next, then the last."""
    words = ["train", *CASES["ppo"], *BASE, "engine.kind=torchrun", "num_steps=2", "--run", "moved"]
    run(sizes[0], words, folder)
    for size, last in ((sizes[-1], 4), (sizes[0], 5)):
        run(size, ["train", "--resume", "moved", f"num_steps={last}", "--no-report"], folder)
    return folder / "moved"


def compare(one: Path, other: Path) -> dict[str, Any]:
    """How far two runs are apart."""
    weights = [load_file(path / "model" / "model.safetensors") for path in (one, other)]
    return {
        "metrics": largest_gap(one, other, "metrics"),
        "collapse": largest_gap(one, other, "collapse"),
        "weights": max(float((w - weights[1][n]).abs().max()) for n, w in weights[0].items()),
        "same_replies": replies(one) == replies(other),
    }


def largest_gap(one: Path, other: Path, stream: Any) -> float:
    """Relative above 1, absolute below."""
    pairs = zip(
        numbers(read_records(one, stream)), numbers(read_records(other, stream)), strict=True
    )
    return max((abs(a - b) / max(1.0, abs(b)) for a, b in pairs), default=0.0)


def numbers(record: object) -> Iterator[float]:
    if isinstance(record, dict):
        for key in sorted(record):
            yield from numbers(record[key])
    elif isinstance(record, list):
        for value in record:
            yield from numbers(value)
    elif isinstance(record, float | int):
        yield float(record)


def replies(run: Path) -> list[list[int]]:
    groups = [group for file in sorted((run / "rollouts").iterdir()) for group in read_groups(file)]
    members = [member for group in groups for member in group.trajectories]
    return [turn.completion_ids.tolist() for member in members for turn in member.turns]


def kill_one(number: int, size: int, folder: Path) -> dict[str, Any]:
    """Kill a random rank once steps run; returns the rank and how long the others lived."""
    rng, name = random.Random(number), f"killed_{number}"
    words = ["train", *CASES["grpo"], *BASE, "num_steps=1000", "checkpoint_every=1"]
    words += ["filter.rule=none", "engine.kind=torchrun", "--run", name]
    agent = start(size, words, folder)
    while not (folder / name / "metrics.jsonl").exists():
        time.sleep(STEP_S)
        assert agent.poll() is None, (folder / "log").read_text()[-4000:]
    time.sleep(3.0 * rng.random())
    ranks = children(agent.pid)
    rank = rng.randrange(size)
    os.kill(ranks[rank], signal.SIGKILL)
    killed = time.monotonic()
    agent.wait()
    seconds = time.monotonic() - killed
    left = [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    done = len(read_records(folder / name))
    again = ["train", "--resume", name, f"num_steps={done + 1}", "--no-report"]
    run(size, again, folder)
    steps = [record["step"] for record in read_records(folder / name)]
    is_whole = steps == list(range(1, done + 2))
    return {"rank": rank, "ended_s": seconds, "left_behind": len(left), "goes_on": is_whole}


def children(pid: int) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        for pair in Path(f"/proc/{child}/environ").read_text().split("\0"):
            if pair.startswith("RANK="):
                found[int(pair.removeprefix("RANK="))] = int(child)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="ranks of torchrun against one process")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(words)
    console = make_console()
    figures: dict[str, Any] = {"cases": {}, "kills": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for case in options.cases:
            alone = train(0, case, folder)
            found = {f"{size} ranks": train(size, case, folder) for size in options.sizes}
            if case == "ppo" and len(options.sizes) > 1:
                found["resumed on others"] = resume_elsewhere(options.sizes, folder)
            for what, path in found.items():
                figures["cases"][f"{case}, {what}"] = gaps = compare(path, alone)
                console.print(f"{case}, {what}: {gaps}", highlight=False)
        for number in range(options.kills):
            figures["kills"].append(kill_one(number, options.sizes[0], folder))
            console.print(f"kill: {figures['kills'][-1]}", highlight=False)
    machine = describe_machine(torch.device("cpu"), bf16=False)
    show_machine(console, machine)
    write_record(options.out, machine, figures)


if __name__ == "__main__":
    main()
