"""Speed of the maths, against its targets on 2 cores.

Run: python benchmarks/core.py [--json FILE]
Prints one table; exit code 1 when a target is missed. Times are the median of repeated calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moored.algo import gae, select_groups
from moored.diagnostics import information


def median_ms(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Median duration over about `seconds` of calls, after one to warm up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def cases() -> dict[str, tuple[Callable[[], object], float | None]]:
    """What is timed, and its target in milliseconds."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((1024, 16)) < rng.random((1024, 1))).astype(float)
    flat, ids = rewards.ravel(), np.repeat(np.arange(1024), 16)
    columns = np.repeat(np.arange(128), 4)
    logp = rng.normal(-60, 2, (512, 128)) + 4 * (columns[:, None] == np.arange(128))
    lengths = np.full(512, 40)
    tokens = rng.random((128, 2048))
    mask = rng.random((128, 2048)) < 0.5
    return {
        "select_groups, 1,024 x 16": (lambda: select_groups(rewards), 1.0),
        "select_groups, flat with ids": (lambda: select_groups(flat, ids), None),
        "information, M=512, N=128": (lambda: information(logp, columns, lengths), 20.0),
        "information, 1,000 bootstrap draws": (
            lambda: information(logp, columns, lengths, bootstrap=1000),
            2000.0,
        ),
        "information, 1,000 permutations": (
            lambda: information(logp, columns, lengths, permutations=1000),
            None,
        ),
        "gae, 128 x 2,048 tokens": (lambda: gae(tokens, tokens, mask), None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rows = [(name, median_ms(call), target) for name, (call, target) in cases().items()]
    missed = [name for name, ms, target in rows if target is not None and ms > target]
    print(f"{'case':<38}{'median ms':>12}{'target ms':>12}")
    for name, ms, target in rows:
        print(f"{name:<38}{ms:>12.3f}{'' if target is None else f'{target:g}':>12}")
    if arguments.json is not None:
        record = {
            "command": "python benchmarks/core.py",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cores": os.cpu_count(),
            "median_ms": {name: ms for name, ms, _ in rows},
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
