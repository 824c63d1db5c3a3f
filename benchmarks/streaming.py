"""How well does the streaming filter agree with batch `top_p`?

    python benchmarks/streaming.py --out benchmarks/results/streaming.json
    python benchmarks/streaming.py --rollouts runs/*/rollouts      # recorded runs as well

Groups of a reward stream are offered one at a time; the same stream cut into batches goes through
batch `top_p`. Precision and recall are of the streamed decisions against the batch's, kept mass is
the share of the reward variance. The row `batch` is a yardstick: batches that are cut half a batch
later, against the first ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from moored.algo import StreamingFilter, reward_variance, select
from moored.analysis.rewards import read_rewards

WINDOWS = (16, 32, 64, 128, 256, 512)
SKIPPED = 512
"""Groups of a simulated stream that fill the largest window before anything is counted."""
DRIFTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "steady": np.zeros_like,
    "slow": lambda time_T: time_T,
    "jump": lambda time_T: (time_T > 0.5).astype(float),
}
"""Place between the first and the last task difficulty, over time from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Streamed decisions against those of batches."""

    precision: float
    recall: float
    kept_mass: float
    batch_kept_mass: float


def success_or_not(rng: np.random.Generator, drift_T: np.ndarray, group_size: int) -> np.ndarray:
    """(T, G) rewards of 0 and 1; most tasks are hard at first (success 1 in 6), easy at the end."""
    rates = rng.beta(0.5 + 2.0 * drift_T, 2.5 - 2.0 * drift_T)
    return (rng.random((len(drift_T), group_size)) < rates[:, None]).astype(float)


def graded(rng: np.random.Generator, drift_T: np.ndarray, group_size: int) -> np.ndarray:
    """(T, G) graded rewards, three in ten groups without variance; RV falls to a fiftieth."""
    spread = rng.lognormal(-2.0 * drift_T, 0.5) * (rng.random(len(drift_T)) > 0.3)
    return rng.normal(size=(len(drift_T), group_size)) * spread[:, None]


STREAMS = {"success or not": success_or_not, "graded": graded}


def batch_decisions(scores_T: np.ndarray, batch_of: np.ndarray, rho: float) -> np.ndarray:
    """(T,) what `top_p` keeps of each batch."""
    kept_T = np.zeros(len(scores_T), dtype=bool)
    for batch in np.unique(batch_of):
        here = np.flatnonzero(batch_of == batch)
        kept_T[here[select(scores_T[here], rule="top_p", value=rho)]] = True
    return kept_T


def streamed_decisions(scores_T: np.ndarray, window: int, rho: float) -> np.ndarray:
    stream = StreamingFilter(rho, window=window)
    return np.array([stream.offer_score(score) for score in scores_T])


def compare(scores_T: np.ndarray, kept_T: np.ndarray, batch_T: np.ndarray) -> Agreement:
    total = scores_T.sum()
    both = np.count_nonzero(kept_T & batch_T)
    return Agreement(
        precision=both / max(np.count_nonzero(kept_T), 1),
        recall=both / max(np.count_nonzero(batch_T), 1),
        kept_mass=float(scores_T[kept_T].sum() / total),
        batch_kept_mass=float(scores_T[batch_T].sum() / total),
    )


def agreements(
    scores_T: np.ndarray, batch_of: np.ndarray, shifted_of: np.ndarray, rho: float, skip: int
) -> dict[str, Agreement]:
    """Agreement for each window, and of shifted batches."""
    batch_T = batch_decisions(scores_T, batch_of, rho)
    decisions = {str(window): streamed_decisions(scores_T, window, rho) for window in WINDOWS}
    decisions["batch"] = batch_decisions(scores_T, shifted_of, rho)
    late = slice(skip, None)
    return {
        name: compare(scores_T[late], kept_T[late], batch_T[late])
        for name, kept_T in decisions.items()
    }


def mean(rows: Sequence[dict[str, Agreement]]) -> dict[str, Agreement]:
    """Field by field over seeds."""
    fields = Agreement.__dataclass_fields__
    return {
        name: Agreement(*(float(np.mean([getattr(r[name], f) for r in rows])) for f in fields))
        for name in rows[0]
    }


def simulate(
    kind: str, drift: str, arguments: argparse.Namespace, num_groups: int
) -> dict[str, Agreement]:
    rows = []
    places = np.arange(num_groups)
    half = arguments.batch // 2
    for seed in range(arguments.seeds):
        rng = np.random.default_rng([seed, list(STREAMS).index(kind)])
        drift_T = DRIFTS[drift](np.linspace(0.0, 1.0, num_groups))
        scores_T = reward_variance(STREAMS[kind](rng, drift_T, arguments.group_size)).variances
        batches = places // arguments.batch, (places + half) // arguments.batch
        rows.append(agreements(scores_T, *batches, arguments.rho, SKIPPED))
    return mean(rows)


def recorded(folder: Path, rho: float) -> tuple[dict[str, Agreement], int]:
    """Agreement over the stored steps of a run; a batch is a step."""
    batch = read_rewards(sorted(folder.glob("*.parquet")))
    scores_T = reward_variance(batch.rewards, batch.group_of).variances
    places = np.arange(len(scores_T))
    size = len(scores_T) // len(np.unique(batch.steps))
    return agreements(scores_T, batch.steps, (places + size // 2) // size, rho, 0), size


def offer_us(num_groups: int = 2000) -> float:
    """Microseconds of one `offer` of 16 rewards with the default window."""
    rewards = (np.random.default_rng(0).random((num_groups, 16)) < 0.3).astype(float)
    stream = StreamingFilter()
    start = time.perf_counter()
    for row in rewards:
        stream.offer(row)
    return (time.perf_counter() - start) / num_groups * 1e6


def show(console: Console, title: str, rows: dict[str, Agreement]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("window", "precision", "recall", "kept mass", "kept mass of batches"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in asdict(row).values()))
    console.print(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rho", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=64, help="groups in a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2048, help="counted groups of a stream")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=Path, nargs="*", default=[], help="folders of runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args(words)
    console = Console(width=max(Console().width, 90))
    figures = {}
    for kind in STREAMS:
        for drift in DRIFTS:
            rows = simulate(kind, drift, arguments, arguments.groups + SKIPPED)
            figures[f"{kind}, {drift}"] = rows
            show(console, f"{kind}, {drift}, batches of {arguments.batch}", rows)
    runs = [recorded(folder, arguments.rho) for folder in arguments.rollouts]
    if runs:
        sizes = sorted({size for _, size in runs})
        figures["recorded"] = mean([rows for rows, _ in runs])
        title = f"{len(runs)} recorded runs, batches of {', '.join(map(str, sizes))}"
        show(console, title, figures["recorded"])
    microseconds = offer_us()
    console.print(f"one offer of 16 rewards: {microseconds:.0f} µs")
    if arguments.out is not None:
        record = {
            "command": "python benchmarks/streaming.py",
            "rollouts": [str(folder) for folder in arguments.rollouts],
            "options": {k: v for k, v in vars(arguments).items() if k not in ("out", "rollouts")},
            "python": platform.python_version(),
            "numpy": np.__version__,
            "offer_us": microseconds,
            "figures": {
                case: {name: asdict(row) for name, row in rows.items()}
                for case, rows in figures.items()
            },
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
