"""Seconds of a step of a warm start: waiting for dialogues, and the update.

    python benchmarks/sft_step.py model=mini recipes/embedded.yaml num_steps=60 workers=4 \
      [--warm-up 20] [--profile] [--out FILE]

The first `--warm-up` steps start processes, compile kernels and record CUDA graphs; the figures are
of the others. With `--profile` the last update is broken down into kernels, as in `sizes.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from harness import describe_machine, make_console, show_machine, synchronize, write_record
from rich.table import Table
from sizes import profile

from moored.cli.options import split_words
from moored.engine.device import pick_device, uses_bf16
from moored.runlog.log import read_records
from moored.sft.loop import SftRun, build_sft, sft_step, start_sft
from moored.sft.options import SftConfig, load_sft_config

PHASES = ("dialogues_s", "update_s", "step_s")


def read_config(words: Sequence[str]) -> SftConfig:
    """Nothing is measured of the model itself."""
    files, options = split_words(words)
    (file,) = files or [{}]
    aside = ["evaluation.num_dialogues=0", "evaluation.num_tasks=0"]
    return load_sft_config(file, [*aside, *options])


def measure(run: SftRun, given: argparse.Namespace) -> dict[str, Any]:
    """Train, and say how long steps took."""
    device = pick_device(run.config.engine.device)
    start_sft(run)
    last = run.config.num_steps
    for step in range(1, last + 1):
        if step == last and given.profile:
            for name, (ms, count) in profile(lambda: sft_step(run, last), device).items():
                print(f"{ms:9.3f} ms {count:6d} x {name}")
        else:
            sft_step(run, step)
            synchronize(device)
    # A profiled step takes longer.
    end = last - given.profile
    timing: list[Any] = read_records(run.log.path, "timing")[given.warm_up : end]
    records: list[Any] = read_records(run.log.path)[given.warm_up : end]
    tokens = [record["train/num_tokens"] for record in records]
    return {
        "phases_s": {name: median(record[name] for record in timing) for name in PHASES},
        "tokens_per_s": sum(tokens) / sum(record["step_s"] for record in timing),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the steps of a warm start.")
    parser.add_argument("words", nargs="+", help="model=…, a YAML file and key=value")
    parser.add_argument("--warm-up", type=int, default=20, help="steps that are left out")
    parser.add_argument("--profile", action="store_true", help="print what takes the time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    given = parser.parse_intermixed_args(words)
    config = read_config(given.words)
    if config.num_steps < given.warm_up + 2:
        parser.error(f"num_steps = {config.num_steps} leaves nothing behind --warm-up")
    console, device = make_console(), pick_device(config.engine.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build_sft(config, Path(folder) / "run")) as run,
    ):
        found = measure(run, given)
    table = Table("phase", "median s")
    for name, seconds in found["phases_s"].items():
        table.add_row(name.removesuffix("_s"), f"{seconds:.4f}")
    console.print(table)
    console.print(f"{found['tokens_per_s']:,.0f} tokens/s")
    machine = describe_machine(device, bf16=uses_bf16(config.engine.dtype, device))
    show_machine(console, machine)
    write_record(given.out, machine, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
