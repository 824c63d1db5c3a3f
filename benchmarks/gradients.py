"""Task and regulariser gradients of `nano` on Sokoban by reward variance, early and late.

    moored train collapse --run runs/grpo
    moored train collapse no_filter algorithm.name=ppo num_steps=60 --run runs/ppo
    moored train collapse no_filter --run runs/no_filter
    python benchmarks/gradients.py --grpo runs/grpo --ppo runs/ppo --no-filter runs/no_filter \\
        --out benchmarks/results/gradients_cpu.json

Each line of the result is one `moored gradients` on the same number of fresh groups, with a KL term
of 0.001 that the runs did not train with, so that both regularisers are seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table

ENTRY = "from moored.cli.main import main; main()"
START = ["collapse", "algorithm.kl_coef=0.001"]


def arms(options: argparse.Namespace) -> dict[str, list[str]]:
    """Words of `moored gradients` for each line."""
    kl = "algorithm.kl_coef=0.001"
    found = {
        f"{label}, start, seed {seed}": [*START, f"algorithm.name={name}", f"seed={seed}"]
        for seed in options.seeds
        for label, name in {"GRPO": "grpo", "Dr. GRPO": "dr_grpo", "PPO": "ppo"}.items()
    }
    for name, run in {
        "GRPO, top-p": options.grpo,
        "PPO, no filter": options.ppo,
        "GRPO, no filter": options.no_filter,
    }.items():
        found |= {} if run is None else {f"{name}, trained": [str(run), kl]}
    return found


def measure(words: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """What `moored gradients` finds, with the seconds it takes."""
    sizes = ["--groups", options.groups, "--group-size", options.group_size]
    sizes += ["--buckets", options.buckets, "--params", options.params]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "gradients", *words, *map(str, sizes), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {**json.loads(done.stdout), "seconds": round(time.perf_counter() - begin, 1)}


def table_of(records: Mapping[str, Mapping[str, Any]]) -> Table:
    """Norms per token of each bucket, lowest RV first."""
    table = Table()
    for name in ("", "term", "norm by bucket, lowest RV first", "SNR"):
        table.add_column(name)
    for name, record in records.items():
        for term in record["whole"]["terms"]:
            found = [bucket["terms"][term] for bucket in record["buckets"]]
            norms = "  ".join(f"{each['norm']:.3g}" for each in found)
            ratios = "  ".join("–" if f["snr"] is None else f"{f['snr']:.1f}" for f in found)
            table.add_row(name, term, norms, ratios)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="gradients of nano by reward variance")
    for name in ("--grpo", "--ppo", "--no-filter"):
        parser.add_argument(name, type=Path, help="a finished run; left out: not measured")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of tasks, at the start")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--params", default="all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    machine = describe_machine(torch.device("cpu"), bf16=False)
    console = make_console()
    records = {name: measure(words, options) for name, words in arms(options).items()}
    console.print(table_of(records))
    show_machine(console, machine)
    write_record(options.out, machine, records)


if __name__ == "__main__":
    main()
