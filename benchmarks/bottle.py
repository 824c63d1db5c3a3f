"""The bottle with seeds: the same run without the filter, with it, and with the filter reversed.

    python benchmarks/bottle.py sokoban ppo model=mini --seeds 5 --steps 100 --jobs 10

Runs every arm with every seed, several at a time, and prints means over seeds with 95 % intervals
(Student's t) at the start and over the last fifth of the steps. `--out` keeps all curves. Runs that
`--minutes` cuts short are compared up to the step that all have reached.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ARMS = {
    "no filter": ["filter.rule=none"],
    "top-p 0.9": [],
    "lowest half": [
        "filter.rule=top_k",
        "filter.value=0.5",
        "filter.largest=false",
        "filter.keep_zero=true",
    ],
}
ENGINE = {"plain engine": ["engine.sampler=plain", "engine.learner=plain"]}
"""For comparing engines, with the filter, instead of filters."""
VIEW, SWAP = "collapse_first_turn_sample", "collapse_observation_swap_sample"
FIGURES = {
    "success": "rollout/success_rate",
    "validity": "rollout/validity_rate",
    "reply tokens": "rollout/reply_tokens_mean",
    "kept": "filter/kept_fraction",
    "retrieval": f"{VIEW}/retrieval_accuracy",
    "MI": f"{VIEW}/mi_estimate",
    "H(Z|X)": f"{VIEW}/conditional_entropy_est",
    "MI, swap": f"{SWAP}/mi_estimate",
    "H(Z|X), swap": f"{SWAP}/conditional_entropy_est",
}
ERRORS = {"MI, error": f"{VIEW}/mi_estimate_se", "MI, swap, error": f"{SWAP}/mi_estimate_se"}
"""Standard errors, kept with the curves and not averaged."""
# Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom.
T_POINTS = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def one_run(
    presets: Sequence[str], options: Sequence[str], folder: Path, seed: int, deadline: float
) -> dict:
    """Train once; curves of all figures as (step, value), the alarm's step, seconds."""
    from moored.config import load_config
    from moored.presets import read_presets
    from moored.runlog.log import read_records
    from moored.train import build_run, start, train

    begin = time.perf_counter()
    config = load_config(read_presets(presets), [*options, f"seed={seed}"])
    run = build_run(config, folder)
    start(run)
    end = train(run, lambda _: time.time() > deadline)
    run.close()
    records = [*read_records(folder), *read_records(folder, "collapse")]
    curves = {
        name: [[r["step"], r[key]] for r in records if isinstance(r.get(key), float)]
        for name, key in (FIGURES | ERRORS).items()
    }
    alarms = [record["step"] for record in records if record.get("alarm")]
    return {
        "seed": seed,
        "end": end,
        "alarm_step": alarms[0] if alarms else None,
        "seconds": time.perf_counter() - begin,
        "curves": curves,
    }


def up_to_shortest(results: Mapping[str, Sequence[dict]]) -> dict[str, list[dict]]:
    """All runs up to the step that every one of them has reached."""
    last = min(run["curves"]["success"][-1][0] for runs in results.values() for run in runs)

    def cut(run: dict) -> dict:
        curves = {
            name: [point for point in curve if point[0] <= last]
            for name, curve in run["curves"].items()
        }
        alarm = run["alarm_step"]
        return run | {"curves": curves, "alarm_step": alarm if alarm and alarm <= last else None}

    return {arm: [cut(run) for run in runs] for arm, runs in results.items()}


def window(curve: Sequence[Sequence[float]], share: float) -> float:
    """Mean over the first (positive share) or last (negative) part of a curve's steps."""
    last = curve[-1][0]
    inside = [v for s, v in curve if (s <= share * last if share > 0 else s > (1 + share) * last)]
    return mean(inside or [curve[0][1] if share > 0 else curve[-1][1]])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    if len(values) < 2:
        return mean(values), math.nan
    return mean(values), T_POINTS[len(values) - 2] * stdev(values) / math.sqrt(len(values))


def show(results: Mapping[str, Sequence[dict]], title: str) -> dict[str, object]:
    """Print start and end of every figure; returns the same for the record."""
    table = Table("", *results, title=title)
    summary: dict[str, object] = {}
    curves = [run["curves"] for runs in results.values() for run in runs]
    for name in (name for name in FIGURES if all(of_run[name] for of_run in curves)):
        for label, share in (("start", 0.05), ("end", -0.2)):
            found = {
                arm: interval([window(run["curves"][name], share) for run in runs])
                for arm, runs in results.items()
            }
            summary[f"{name}, {label}"] = found
            cells = [f"{centre:.2f} ± {half:.2f}" for centre, half in found.values()]
            table.add_row(f"{name}, {label}", *cells)
    ends = [", ".join(str(run["curves"]["success"][-1][0]) for run in r) for r in results.values()]
    table.add_row("last step", *ends)
    alarms = [", ".join(str(run["alarm_step"] or "–") for run in r) for r in results.values()]
    table.add_row("alarm at step", *alarms)
    Console(width=110).print(table)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description="The bottle with seeds.")
    parser.add_argument("what", nargs="+", help="presets and options, as for `moored train`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then runs are cut short")
    parser.add_argument("--arms", nargs="+", choices=ARMS | ENGINE, default=list(ARMS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    presets = [word for word in given.what if "=" not in word]
    options = [word for word in given.what if "=" in word]
    options += [f"num_steps={given.steps}", f"checkpoint_every={given.steps}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    deadline = time.time() + 60.0 * given.minutes
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, mp_context=context) as pool,
    ):
        futures = {
            arm: [
                pool.submit(
                    partial(
                        one_run,
                        presets,
                        [*options, *(ARMS | ENGINE)[arm]],
                        Path(folder) / f"{arm}-{seed}".replace(" ", "_"),
                        seed,
                        deadline,
                    )
                )
                for seed in range(given.first_seed, given.first_seed + given.seeds)
            ]
            for arm in given.arms
        }
        results = {arm: [f.result() for f in runs] for arm, runs in futures.items()}
    summary = show(up_to_shortest(results), escape(" ".join(given.what)))
    if given.out:
        import torch
        import transformers

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"transformers": transformers.__version__},
            "hardware": {"gpu": gpu, "cores": os.cpu_count()},
            "summary": summary,
            "runs": results,
        }
        given.out.write_text(json.dumps(record, default=lambda x: round(float(x), 4)) + "\n")


if __name__ == "__main__":
    main()
