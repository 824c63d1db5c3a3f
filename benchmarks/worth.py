"""What is reasoning that depends on its prompt worth, before any training?

    python benchmarks/worth.py MODEL [MODEL …] [--tasks 64] [--group-size 16] [--out FILE]

Groups of Sokoban in the form of the model cards (one turn, up to 10 moves), eight at a time as in a
look of training: each reasoning is scored under the eight prompts. `gain_reward_correlation` sets
what that says of it beside what its plan earned, inside prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table
from stated_facts import ENV, validation_tasks

from moored.config import load_config
from moored.diagnostics import cross_score, first_turn_pairs, gain_reward_correlation
from moored.diagnostics.information import Likelihood
from moored.engine.build import build_engine
from moored.engine.device import pick_device
from moored.rollout.episodes import roll_out

PROMPTS = 8
"""Of a look."""


def measure(model: str, num_tasks: int, group_size: int) -> dict[str, float]:
    rollout = {"max_response_tokens": 128, "max_context": 1024}
    config = load_config({"model": model, "env": ENV, "rollout": rollout})
    gains, rewards, prompts, successes = [], [], [], []
    with closing(build_engine(config, trains=False)) as engine:
        for start in range(0, num_tasks, PROMPTS):
            tasks = validation_tasks(config, range(start, start + PROMPTS), group_size)
            groups = roll_out(
                tasks, engine=engine, options=config.rollout, temperature=1.0, seed=(0, start)
            )
            pairs = first_turn_pairs(groups, num_pairs=len(tasks) * group_size)
            logp_MN = cross_score(pairs, engine.scorer.score) / pairs.lengths[:, None]
            gains += Likelihood.of(logp_MN, pairs.columns).gain_M.tolist()
            known = {group.group_id: group.trajectories for group in groups}
            successes += [known[pair.group_id][pair.trajectory].success for pair in pairs.pairs]
            rewards += [pair.reward for pair in pairs.pairs]
            prompts += [pair.group_id for pair in pairs.pairs]
    worth = gain_reward_correlation(gains, rewards, prompts)
    found = {"MI": float(np.mean(gains)), "success": float(np.mean(successes))}
    return found | (worth.metrics("") if worth else {})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does reasoning that fits its prompt earn more?")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name or a folder")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(words)
    if options.tasks < PROMPTS or options.tasks % PROMPTS:
        parser.error(f"--tasks must be a multiple of {PROMPTS}, got {options.tasks}")
    figures = {name: measure(name, options.tasks, options.group_size) for name in options.models}
    table = Table("", *figures)
    for row in dict.fromkeys(row for own in figures.values() for row in own):
        cells = (f"{own[row]:+.3f}" if row in own else "" for own in figures.values())
        table.add_row(row.lstrip("/"), *cells)
    console, machine = make_console(), describe_machine(pick_device("auto"), bf16=False)
    console.print(table)
    show_machine(console, machine)
    write_record(options.out, machine, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
