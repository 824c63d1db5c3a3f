"""Calls of environments per second through `EnvPool`, against plain calls.

    python benchmarks/pool.py [--calls 20000] [--batch 128]

Each call computes for about 20 µs, as a small environment's `step` does; a batch is one turn of a
rollout in lockstep.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from moored.rollout.pool import EnvPool

CALL_LOOPS = 500


def short_call() -> int:
    """About 20 µs of Python."""
    return sum(range(CALL_LOOPS)) + sum(range(CALL_LOOPS))


def rate(run: Callable[[Sequence[Callable[[], int]]], object], calls: int, batch: int) -> float:
    """Calls per second, the best of three runs."""
    best_s = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls // batch):
            run([short_call] * batch)
        best_s = min(best_s, time.perf_counter() - start)
    return calls // batch * batch / best_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of EnvPool.")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    plain = rate(lambda calls: [call() for call in calls], arguments.calls, arguments.batch)
    print(f"plain calls  {plain:10,.0f} calls/s  {1e6 / plain:6.1f} µs per call")
    for workers in (1, 4):
        with EnvPool(workers=workers) as pool:
            found = rate(pool.run_all, arguments.calls, arguments.batch)
        print(f"{workers} worker(s)  {found:10,.0f} calls/s  {1e6 / found:6.1f} µs per call")


if __name__ == "__main__":
    main()
