"""Gradients by reward variance for every run of a study, early and late, with intervals over seeds.

    moored study bottle_mini num_steps=80 checkpoint_every=10 --only task=sokoban \\
        --only algorithm=ppo,grpo --only filter=none,top_p --seeds 60-63 --jobs 16 \\
        --out runs/gradients_80
    python benchmarks/gradients_study.py runs/gradients_80 --checkpoints 80 --jobs 6 [--out FILE]

A run keeps its last two checkpoints: for an earlier step, run the study to that step alone.
Each measurement is one `moored gradients` on fresh groups, with a KL term of 0.001 that PPO runs do
not train with, so that both regularisers are seen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gradients import measure
from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table

from moored.analysis.compare import half_width

Record = Mapping[str, Any]


def runs_of(study: Path) -> dict[str, dict[int, Path]]:
    """Run directories of a study, by arm and seed."""
    found: dict[str, dict[int, Path]] = {}
    for folder in sorted(study.glob("**/seed-*/config.yaml")):
        run = folder.parent
        arm = str(run.parent.relative_to(study))
        found.setdefault(arm, {})[int(run.name.removeprefix("seed-"))] = run
    if not found:
        raise SystemExit(f"no finished runs in {str(study)!r}; run the study first")
    return found


def measure_all(
    runs: Mapping[str, Mapping[int, Path]], options: argparse.Namespace
) -> dict[str, dict[str, dict[str, Any]]]:
    """By arm and checkpoint, then by seed."""
    words = {
        (f"{arm}, step {step}", str(seed)): [
            *(str(run), "algorithm.kl_coef=0.001", "--checkpoint", str(step)),
            *("-o", str(run / f"gradients_{step}")),
        ]
        for arm, seeds in runs.items()
        for step in options.checkpoints
        for seed, run in seeds.items()
    }
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda each: measure(each, options), words.values())
    records: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, seed), record in zip(words, found, strict=True):
        records.setdefault(name, {})[seed] = record
    return records


def across_seeds(records: Sequence[Record], bucket: int, *keys: str) -> tuple[float, float]:
    """Mean and half of the 95 % interval of one figure of a bucket."""
    values = []
    for record in records:
        found: Any = record["buckets"][bucket]
        for key in keys:
            found = found.get(key) if found is not None else None
        values.append(math.nan if found is None else float(found))
    known = [value for value in values if not math.isnan(value)]
    if len(known) < len(values):
        return math.nan, math.nan
    return sum(known) / len(known), half_width(known) or 0.0


def table_of(measured: Mapping[str, Mapping[str, Record]]) -> Table:
    """Means over seeds, lowest RV first."""
    table = Table()
    for name in ("", "bucket", "RV", "task norm", "task SNR", "entropy norm", "KL norm"):
        table.add_column(name)
    for name, by_seed in measured.items():
        records = list(by_seed.values())
        for bucket in range(len(records[0]["buckets"])):
            paths = (("rv_mean",), ("terms", "task", "norm"), ("terms", "task", "snr"))
            paths += (("terms", "entropy", "norm"), ("terms", "kl", "norm"))
            cells = (across_seeds(records, bucket, *path) for path in paths)
            texts = ("–" if math.isnan(m) else f"{m:.3g} ± {h:.2g}" for m, h in cells)
            table.add_row(name, f"Q{bucket + 1}", *texts)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="gradients of the runs of a study")
    parser.add_argument("study", type=Path)
    parser.add_argument("--checkpoints", type=int, nargs="+", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--params", default="all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    is_gpu = torch.cuda.is_available()
    machine = describe_machine(torch.device("cuda" if is_gpu else "cpu"), bf16=is_gpu)
    records = measure_all(runs_of(options.study), options)
    console = make_console()
    console.print(table_of(records))
    show_machine(console, machine)
    write_record(options.out, machine, records)


if __name__ == "__main__":
    main()
