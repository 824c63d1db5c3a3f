"""The same training on two sides for several seeds: do the figures differ by more than noise?

Tasks and first weights of a seed are the same on both sides, so differences are paired. The noise
is their spread over seeds: `p` is the share of the sign flips of these differences whose mean is as
far from 0 as the one that was found. Below 0.01 the sides would differ by more than noise.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

FIGURES = {
    "metrics.jsonl": (
        "rollout/reward_mean",
        "rollout/success_rate",
        "rollout/validity_rate",
        "rollout/reply_tokens_mean",
        "rollout/reward_variance_mean",
        "filter/kept_fraction",
        "learner/entropy",
    ),
    "collapse.jsonl": (
        "collapse_first_turn_sample/mi_estimate",
        "collapse_first_turn_sample/conditional_entropy_est",
        "collapse_first_turn_sample/retrieval_accuracy",
    ),
}
"""What is compared, by file of the run directory."""
MIN_P = 0.01


def read(file: Path, name: str) -> list[float]:
    """A figure over the steps of a run that have it."""
    records = map(json.loads, file.read_text().splitlines())
    return [record[name] for record in records if record.get(name) is not None]


def compare(values_KS: np.ndarray, sides: Sequence[str]) -> dict[str, object]:
    """K seeds, S = 2 sides: means, paired differences, and how often chance gives as much."""
    differences = values_KS[:, 1] - values_KS[:, 0]
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(differences))))
    means = np.abs(signs @ differences) / len(differences)
    found = abs(differences.mean())
    return {
        f"{sides[0]}_mean": float(values_KS[:, 0].mean()),
        f"{sides[1]}_mean": float(values_KS[:, 1].mean()),
        "difference": float(differences.mean()),
        "standard_error": float(differences.std(ddof=1) / np.sqrt(len(differences))),
        f"seed_std_of_{sides[0]}": float(values_KS[:, 0].std(ddof=1)),
        "p": float(np.mean(means >= found * (1.0 - 1e-9))),
        "by_seed": values_KS.tolist(),
    }


def compare_runs(pairs: Sequence[Mapping[str, Path]]) -> dict[str, dict[str, object]]:
    """Every figure of runs, by seed and then by side, as means over their steps."""
    sides, found = tuple(pairs[0]), {}
    for stream, names in FIGURES.items():
        for name in names:
            means = [
                [float(np.mean(read(pair[s] / stream, name))) for s in sides] for pair in pairs
            ]
            found[name] = compare(np.array(means), sides)
    return found


def show_compared(console: Console, compared: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of what `compare_runs` found."""
    table = Table(title="means over steps and seeds")
    table.add_column("")
    columns = [*list(next(iter(compared.values())))[:4], "p"]
    for name in columns:
        table.add_column(name.replace("_", " "))
    for name, figure in compared.items():
        table.add_row(name, *(f"{figure[column]:.4f}" for column in columns))
    console.print(table)
