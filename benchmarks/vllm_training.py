"""Does training with vLLM as the sampler give what the local sampler gives?

    python benchmarks/vllm_training.py [--seeds 8] [--steps 20] [--out FILE] [train words …]

Runs the same training with `engine.sampler=auto` and `engine.sampler=vllm` for several seeds, each
in a process of its own, in the environment of `make test-vllm`. vLLM takes the weights over in
every step. With `algorithm.old_logprobs=learner` every token that is trained on is scored by the
learner before the update, so that the largest gap of a step is over all of them.

The two samplers draw with other generators, so replies differ: `paired.py` says what is noise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import describe_machine, make_console, show_machine, write_record
from paired import MIN_P, compare_runs, read, show_compared

from moored.engine.vllm.support import installed_version

SAMPLERS = ("auto", "vllm")
WORDS = ("collapse", "collapse.every=2", "algorithm.old_logprobs=learner")
GAP = "mismatch/logp_gap_max"
PHASES = ("rollout_s", "publish_s", "update_s")
MAX_GAP = 1e-3
"""Nats between sampler and learner that are rounding."""


def train(words: Sequence[str], sampler: str, seed: int, folder: Path) -> None:
    """One run, on one thread."""
    options = [*words, f"engine.sampler={sampler}", "engine.device=cpu", f"seed={seed}"]
    options += ["log.rollouts_every=0", "--no-report", "--run", str(folder)]
    command = [sys.executable, "-c", "from moored.cli.main import main; main()", "train", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[3:])} failed:\n{done.stdout}{done.stderr}")


@dataclass(slots=True)
class Found:
    """What the runs gave, by figure or by sampler."""

    pairs: list[Mapping[str, Path]] = field(default_factory=list)
    """By seed: the run of every sampler."""
    gaps: dict[str, list[list[float]]] = field(default_factory=dict)
    """Of every sampler, by seed: the largest gap of each step."""
    seconds: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Of every sampler, by seed: median seconds of phases."""

    def add(self, runs: Mapping[str, Path]) -> None:
        """Read the runs of one seed."""
        self.pairs.append(runs)
        for sampler, run in runs.items():
            self.gaps.setdefault(sampler, []).append(read(run / "metrics.jsonl", GAP))
            medians = {name: float(np.median(read(run / "timing.jsonl", name))) for name in PHASES}
            self.seconds.setdefault(sampler, []).append(medians)

    def record(self) -> dict[str, object]:
        gaps = self.gaps.items()
        return {
            "compared": compare_runs(self.pairs),
            "largest_logp_gap": {sampler: max(map(max, runs)) for sampler, runs in gaps},
            "largest_logp_gap_of_last_step": {s: max(run[-1] for run in runs) for s, runs in gaps},
            "median_seconds_by_seed": self.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="further words of `moored train`")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    given = parser.parse_args()
    words, found = [*WORDS, f"num_steps={given.steps}", *given.words], Found()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            runs = {sampler: Path(folder) / f"{sampler}-{seed}" for sampler in SAMPLERS}
            for sampler, run in runs.items():
                train(words, sampler, seed, run)
            found.add(runs)
            print(f"seed {seed} done", flush=True)
        record: dict[str, Any] = found.record()
    machine = describe_machine(torch.device("cpu"), bf16=False)
    machine |= {"vllm": installed_version(), "train": " ".join(words)}
    _show(machine, record)
    write_record(given.out, machine, record)
    is_off = record["largest_logp_gap"]["vllm"] > MAX_GAP
    sys.exit(is_off or any(figure["p"] < MIN_P for figure in record["compared"].values()))


def _show(machine: dict[str, object], record: dict[str, Any]) -> None:
    console = make_console()
    show_compared(console, record["compared"])
    worst = record["largest_logp_gap"]
    console.print(f"largest gap to the learner's log-probabilities, nats: {worst}")
    show_machine(console, machine)


if __name__ == "__main__":
    main()
