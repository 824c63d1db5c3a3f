"""Seconds of a training step by phase, for any run that `moored train` can make.

    python benchmarks/step_time.py sokoban ppo model=mini optimizer.lr=1e-4 num_steps=60 \
      [--warm-up 20] [--out FILE]

The first `--warm-up` steps compile kernels and record CUDA graphs; the figures are of the others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
from harness import describe_machine, make_console, show_machine, synchronize, write_record
from rich.table import Table

from moored.cli.options import read_config
from moored.engine.device import pick_device, uses_bf16
from moored.train import StepRecord, build_run, start, train_step

ASIDE = ["collapse.every=0", "log.rollouts_every=0", "stop.low_variance=0", "stop.min_success=0"]
"""A plain step: no look, nothing stored, no early stop."""


def measure(words: list[str], warm_up: int) -> dict[str, object]:
    """Train, and say how long steps took."""
    config = read_config([*ASIDE, *words])
    device = pick_device(config.engine.device)
    records: list[StepRecord] = []
    steps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(config, Path(folder) / "run")
        try:
            start(run)
            for step in range(1, config.num_steps + 1):
                begin = time.perf_counter()
                records.append(train_step(run, step))
                synchronize(device)
                steps.append(time.perf_counter() - begin)
        finally:
            run.close()
    timing = [record.seconds for record in records[warm_up:]]
    return {
        "words": words,
        "num_steps": len(steps),
        "warm_up": warm_up,
        "median_s": median(steps[warm_up:]),
        "mean_s": mean(steps),
        "first_s": steps[0],
        "phases_s": {name: median(t.get(name, 0.0) for t in timing) for name in timing[-1]},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "taken_gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None,
        "last_step": {
            name: value
            for name, value in records[-1].metrics.items()
            if name.startswith(("mismatch/", "tokens/", "rollout/validity"))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the phases of training steps.")
    parser.add_argument("words", nargs="+", help="presets and key=value, as for moored train")
    parser.add_argument("--warm-up", type=int, default=20, help="steps that are left out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    given = parser.parse_intermixed_args()  # words may stand behind options too
    config = read_config(given.words)
    device = pick_device(config.engine.device)
    console = make_console()
    found = measure(given.words, given.warm_up)
    table = Table("phase", "median s")
    for phase, seconds in {**found["phases_s"], "step": found["median_s"]}.items():  # pyright: ignore
        table.add_row(phase, f"{seconds:.4f}")
    console.print(table)
    console.print(json.dumps(found["last_step"]), soft_wrap=True, highlight=False)
    machine = describe_machine(device, bf16=uses_bf16(config.engine.dtype, device))
    show_machine(console, machine)
    write_record(given.out, machine, found)


if __name__ == "__main__":
    main()
