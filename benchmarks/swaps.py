"""Does a verdict change with the view that it follows? Looks of runs that measured both swaps.

    python benchmarks/swaps.py RUN [RUN …] [--out FILE]

Each run is judged twice from the reports in its `collapse.jsonl`: following observation swap alone,
and as training did, following episode swap and its agreement with the other views. Prints and
stores how many looks of each arm get which two verdicts, the alarms, and the nats that controls
take off.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import describe_machine, make_console, write_record
from rich.table import Table

from moored.analysis.stored import read_report
from moored.diagnostics.watch import CollapseWatch
from moored.runlog.log import read_records

VIEWS = ("observation_swap", "episode_swap", "first_turn")


def judge(run: Path) -> dict[str, Any]:
    """The looks of one run, by both views."""
    newest, looks = CollapseWatch(), []
    for record in read_records(run, "collapse"):
        stored: Mapping[str, Any] = record["reports"]  # pyright: ignore[reportAssignmentType]
        step = int(record["step"])  # pyright: ignore[reportArgumentType]
        if not set(VIEWS) <= stored.keys():
            continue
        reports = {view: read_report(stored[view], f"{run}, step {step}") for view in VIEWS}
        looks.append(
            {
                "step": step,
                "verdicts": [
                    str(newest.update(step, reports["observation_swap"]).verdict),
                    str(record["verdict"]),
                ],
                "mi": {view: reports[view].mi_estimate for view in VIEWS},
                "control": {view: reports[view].control_mi for view in VIEWS[:2]},
                "alarm": bool(record["alarm"]),
            }
        )
    arm, seed = run.parent.as_posix(), int(run.name.removeprefix("seed-"))
    return {
        "arm": "/".join(Path(arm).parts[-4:]),
        "seed": seed,
        "newest_alarm": None if newest.alarm is None else newest.alarm.step,
        "alarm": next((look["step"] for look in looks if look["alarm"]), None),
        "looks": looks,
    }


def show(runs: list[dict[str, Any]]) -> None:
    table = Table("arm", "runs", "newest → episodes: looks", "alarms", "control, nats", "MI, nats")
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        looks = [look for run in own for look in run["looks"]]
        pairs = Counter(" → ".join(look["verdicts"]) for look in looks)
        alarms = [f"{run['newest_alarm'] or '-'}/{run['alarm'] or '-'}" for run in own]
        means = [
            " / ".join(f"{fmean(look[name][view] for look in looks):.2f}" for view in VIEWS[:2])
            for name in ("control", "mi")
        ]
        counts = "\n".join(f"{pair}: {count}" for pair, count in pairs.most_common())
        table.add_row(arm, str(len(own)), counts, ", ".join(alarms), *means)
    make_console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [judge(run) for run in args.runs]
    show(runs)
    if args.out:
        write_record(args.out, describe_machine(torch.device("cpu"), bf16=False), runs)


if __name__ == "__main__":
    main()
