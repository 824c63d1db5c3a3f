"""10 to 10,000 rollout workers, simulated with measured latencies: what bounds their throughput?

    cd benchmarks && python -m simulation.run --out results/simulation.json [--stored FILE]

First the measurements of `real.py`: steps of environments, calls of Ray actors, and real
rollouts, which the simulation is compared with. `--stored` takes them from an earlier result, and
simulates again. Then the experiments, with a replica for every 64 workers and the decoding steps of
3 B on an H200.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from simulation.calls import Calls
from simulation.events import Spread
from simulation.model import Outcome, Scenario, simulate

WORKERS = (10, 100, 300, 1000, 3000, 10000)
WORKERS_PER_REPLICA = 64
STEP_S, ROW_S = 1.91e-3, 10.3e-6
"""Decoding of 3 B on an H200: 2.08 ms at 16 rows and 3.23 ms at 128 (decode_h200.json). A replica
has 64 rows, where these give 2.57 ms and 2.55 were measured."""
DRIVER_TURNS_PER_S = 11_770.0
"""Of Sokoban, with rendering and recording, on one core that other processes used too: the median
by the processor's clock (driver.json)."""
TURNS_PER_EPISODE = 4901 / 1008
DRIVER_TURN_S = TURNS_PER_EPISODE / (TURNS_PER_EPISODE + 0.5) / DRIVER_TURNS_PER_S
"""Of 1,008 episodes of Sokoban (driver.json); environments are part of it. The seconds that were
measured hold the beginning of each episode, which the simulation charges half a turn for."""
NETWORK_S = 0.2e-3
"""One way between two machines of a data centre: an assumption."""
REPLY_TOKENS = Spread(median=150.0, sigma=0.5, most=400.0)
"""An assumption; the longest is the paper's."""
REMOTE = Spread(median=0.3, sigma=1.0, most=60.0)
"""A slow remote environment: an assumption; one call in a hundred takes 3 s and more."""
HANGING = 60.0
"""`rollout.env_timeout_s`: what a call that hangs costs."""
SEEDS = (0, 1, 2)
REPEATS = 10
"""Real rollouts of each kind."""
RAY, DRIVEN = (
    "64 episodes, 4 replicas behind Ray calls",
    "1,000 episodes, nothing but the driver, by the processor's clock",
)

Measured = Mapping[str, Any]


def scenario(workers: int, **changes: Any) -> Scenario:
    """All episodes of a step at once; environments answer at once unless `env_s` says otherwise."""
    given: dict[str, Any] = {
        "workers": workers,
        "replicas": max(1, round(workers / WORKERS_PER_REPLICA)),
        "episodes": workers,
        "num_steps": 2,
        "reply_tokens": REPLY_TOKENS,
        "env_s": Spread(median=1e-6),
        "driver_turn_s": DRIVER_TURN_S,
        "network_s": NETWORK_S,
        "step_s": STEP_S,
        "row_s": ROW_S,
    }
    return Scenario(**{**given, **changes})


def record(outcome: Outcome) -> dict[str, Any]:
    """What is stored of a simulation."""
    return {
        "turns_per_s": round(outcome.turns_per_s, 1),
        "seconds": round(outcome.seconds, 3),
        "rollout_s": [round(s, 3) for s in outcome.rollout_s],
        "tail_s": [round(s, 3) for s in outcome.tail_s],
        "driver_share": round(outcome.driver_share, 3),
        "mean_lag": round(outcome.mean_lag, 3),
        "turn_s": {part: round(s, 4) for part, s in outcome.turn_s.items()},
        "bound": outcome.bound,
    }


def spread(measured: Measured, name: str) -> Spread:
    found = measured["env_s"][name]
    return Spread(shares=tuple(found["shares"]), values=tuple(found["values"]))


def grow(measured: Measured) -> dict[str, dict[str, Any]]:
    """More and more workers, by way of working."""
    costs = measured["calls"]
    ray = Calls(call_s=costs["call_s"], request_s=costs["request_s"], poll_s=0.02)
    code = spread(measured, "code")
    ways: dict[str, dict[str, Any]] = {
        "lockstep": {"mode": "lockstep"},
        "streams": {},
        "streams, Ray calls": {"calls": ray},
        "streams, Ray, 4 drivers": {"calls": ray, "drivers": 4},
        "code, streams": {"env_s": code},
        "remote, lockstep": {"mode": "lockstep", "env_s": REMOTE},
        "remote, streams": {"env_s": REMOTE},
        "remote, streams, Ray calls": {"env_s": REMOTE, "calls": ray},
    }
    return {
        name: {str(num): record(simulate_seeds(scenario(num, **way))) for num in WORKERS}
        for name, way in ways.items()
    }


def simulate_seeds(given: Scenario) -> Outcome:
    """The steps of all seeds as if they were of one run: the longest calls differ much by seed."""
    outcomes = [simulate(replace(given, seed=seed)) for seed in SEEDS]
    seconds = sum(one.seconds for one in outcomes)

    def mean(of: Callable[[Outcome], float]) -> float:
        return sum(of(one) * one.seconds for one in outcomes) / seconds

    return replace(
        outcomes[0],
        seconds=seconds,
        rollout_s=[s for one in outcomes for s in one.rollout_s],
        tail_s=[s for one in outcomes for s in one.tail_s],
        learn_s=[s for one in outcomes for s in one.learn_s],
        num_turns=sum(one.num_turns for one in outcomes),
        turns_per_s=mean(lambda one: one.turns_per_s),
        tokens_per_s=mean(lambda one: one.tokens_per_s),
        driver_share=mean(lambda one: one.driver_share),
        replica_share=mean(lambda one: one.replica_share),
        turn_s={
            part: sum(one.turn_s[part] for one in outcomes) / len(outcomes)
            for part in outcomes[0].turn_s
        },
    )


def overlap() -> dict[str, dict[str, Any]]:
    """Lag, with 1,000 workers and an update that takes as long as a rollout without stragglers."""
    cases = {"quick": Spread(median=1e-6), "remote": REMOTE}
    found: dict[str, dict[str, Any]] = {}
    for name, env_s in cases.items():
        base = scenario(1000, env_s=env_s, num_steps=8)
        rollout_s = simulate(replace(base, num_steps=1)).rollout_s[0]
        for lag in (0, 1):
            outcome = simulate(replace(base, update_s=rollout_s, publish_s=0.2, max_lag=lag))
            found[f"{name}, lag {lag}"] = {
                **record(outcome),
                "step_s": round(outcome.seconds / 8, 3),
                "update_s": round(rollout_s, 3),
            }
    return found


def dispatch() -> dict[str, dict[str, Any]]:
    """Who gets the next episode, with and without replicas that are three times as slow.

    Workers play four episodes of a step each, so that episodes begin while others are written.
    """
    found: dict[str, dict[str, Any]] = {}
    for slow in (0, 2):
        for way in ("random", "in turn", "least busy"):
            base = scenario(1000, episodes=4000, num_steps=1, dispatch=way, slow_factor=3.0)
            base = replace(base, slow_share=slow / base.replicas)
            seconds = [simulate(replace(base, seed=seed)).seconds for seed in SEEDS]
            name = f"{way}, {slow} of {base.replicas} slow"
            found[name] = {"seconds": round(sum(seconds) / len(seconds), 3)}
    return found


def stragglers() -> dict[str, dict[str, Any]]:
    """One call in a thousand hangs until its time limit."""
    hanging = Spread(shares=(0.0, 0.999, 0.9991, 1.0), values=(0.1, 0.1, HANGING, HANGING))
    found = {}
    for name, limit_s in {"limit 60 s": 60.0, "limit 5 s": 5.0}.items():
        env_s = replace(hanging, most=limit_s)
        for mode in ("lockstep", "stream"):
            outcome = simulate(scenario(1000, env_s=env_s, mode=mode))
            found[f"{mode}, {name}"] = record(outcome)
    return found


def behind_ray(base: Scenario, costs: Mapping[str, float]) -> Scenario:
    """The same on 4 slower replicas in processes of their own."""
    return replace(
        base,
        replicas=4,
        step_s=2 * base.step_s,
        row_s=2 * base.row_s,
        network_s=(costs["round_trip_s"] - costs["call_s"]) / 2,
        calls=Calls(call_s=costs["call_s"], request_s=costs["request_s"], poll_s=0.02),
    )


def cases(turn_s: float, costs: Mapping[str, float]) -> dict[str, Scenario]:
    """What real rollouts are compared with; `turn_s` is what a turn of them costs the driver."""
    base = Scenario(
        workers=64,
        replicas=1,
        episodes=64,
        turns=4,
        num_steps=1,
        reply_tokens=Spread(median=60.0, sigma=0.5, most=200.0),
        env_s=Spread(median=0.05, sigma=0.8, most=1.0),
        driver_turn_s=turn_s,
        step_s=2e-3,
        row_s=20e-6,
    )
    still = replace(base, reply_tokens=Spread(median=1.0), env_s=Spread(), step_s=0.0, row_s=0.0)
    return {
        "64 episodes, 64 environments at a time": base,
        "64 episodes, 8 environments at a time": replace(base, env_calls=8),
        "256 episodes, 256 environments at a time": replace(base, workers=256, episodes=256),
        RAY: behind_ray(base, costs),
        DRIVEN: replace(still, workers=1000, episodes=1000, env_calls=1),
    }


def measure() -> Measured:
    """Everything that is measured here; the driver's turn is for the comparison alone."""
    from simulation.cluster import measure as measure_cluster
    from simulation.real import ENVS, RealRollouts, measure_calls, measure_env, measure_store

    env_s = {name: measure_env(name, 300 if name == "code" else 4000) for name in ENVS}
    calls = asdict(measure_calls())
    real = RealRollouts()
    turn_s = real.driver_turn_s()
    seconds: dict[str, list[float]] = {}
    for name, case in cases(turn_s, calls).items():
        if name == RAY:
            seconds[name] = measure_cluster(real, case, REPEATS)
        elif name == DRIVEN:
            seconds[name] = [real.processor_s(case, seed) for seed in range(5)]
        else:
            seconds[name] = [real.seconds(case, seed) for seed in range(REPEATS)]
    return {
        "env_s": {name: {"shares": s.shares, "values": s.values} for name, s in env_s.items()},
        "calls": calls,
        "store": measure_store(),
        "driver_turn_s": turn_s,
        "compared": {
            name: {"real_s": float(np.mean(own)), "real_std_s": float(np.std(own))}
            for name, own in seconds.items()
        },
    }


def compare(measured: Measured) -> dict[str, dict[str, float]]:
    """Real seconds of a rollout beside simulated ones; rows may have a turn of their own."""
    found: dict[str, dict[str, float]] = {}
    for name, own in measured["compared"].items():
        turn_s = own.get("driver_turn_s", measured["driver_turn_s"])
        case = cases(turn_s, measured["calls"])[name]
        seconds = [simulate(replace(case, seed=seed)).seconds for seed in range(REPEATS)]
        simulated = {"simulated_s": float(np.mean(seconds))}
        simulated["simulated_std_s"] = float(np.std(seconds))
        found[name] = {**own, **simulated, "error": simulated["simulated_s"] / own["real_s"] - 1.0}
    return found


def show(console: Console, title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("", title=title, min_width=len(title))
    keys = list(next(iter(found.values())))
    for key in keys:
        table.add_column(key, justify="right")
    for name, own in found.items():
        table.add_row(name, *(_cell(own[key]) for key in keys))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['turns_per_s']:,.0f} {value['bound'][:7]}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate 10 to 10,000 rollout workers.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--stored", type=Path, metavar="FILE", help="measurements of this result")
    given = parser.parse_args(words)
    stored = json.loads(given.stored.read_text()) if given.stored else {}
    measured = stored["measured"] if stored else measure()
    measured = {**measured, "compared": compare(measured)}
    found = {
        "growth": grow(measured),
        "overlap": overlap(),
        "dispatch": dispatch(),
        "stragglers": stragglers(),
    }
    console = Console(width=150)
    show(console, "real and simulated rollouts", measured["compared"])
    for name, part in found.items():
        keys = {key for own in part.values() for key in own} - {"turn_s", "rollout_s", "tail_s"}
        shown = {row: {k: v for k, v in own.items() if k in keys} for row, own in part.items()}
        show(console, name, shown)
    if given.out:
        about = {"command": " ".join(["python", "-m", "simulation.run", *sys.argv[1:]])}
        about |= {"python": platform.python_version(), "machine": "2 cores that others used too"}
        about |= {"note": stored["note"]} if "note" in stored else {}
        text = json.dumps({**about, "measured": measured, **found}, indent=1)
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
