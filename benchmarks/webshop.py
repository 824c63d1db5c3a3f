"""Page actions of the web shop per second on one core, against the target of 2,000.

    python benchmarks/webshop.py [--json FILE] [--episodes 400]

Exit code 1 when the target is missed. One process, one core, wall clock; rates are the best of
three. An action is a whole `step`: parse the reply, act, write the next page. Visitors search for
the words of their goal, turn pages, open products and their sub-pages, choose options and buy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import median

from moored.envs import format_reply
from moored.envs.webshop.env import WebShop
from moored.envs.webshop.shop import generated_catalogue

TARGET_PER_S = 2000.0
REPEATS = 3
KINDS = ("search", "results", "item", "sub-page", "buy")


def browse(env: WebShop, seed: int, seconds: dict[str, list[float]]) -> None:
    """One visit of random actions that are possible on their page; notes the time of each."""
    rng = random.Random(seed)
    env.reset(seed)
    is_over = False
    while not is_over:
        answer = _next_answer(env, rng)
        reply = format_reply("I look around.", answer)
        start = time.perf_counter()
        is_over = env.step(reply).is_over
        elapsed = time.perf_counter() - start
        seconds[_kind_of(env, answer)].append(elapsed)


def _next_answer(env: WebShop, rng: random.Random) -> str:
    goal, visit = env.goal, env.visit
    if visit.place == "search":
        return f"search[{' '.join((*goal.attributes, goal.query, *goal.options))}]"
    buttons = [x for x in env.walk.buttons(visit) if x != "Back to Search"]
    if visit.place == "results":
        buttons += env.walk.shown(visit)
    if visit.place == "item":
        buttons += [x for values in env.walk.product(visit).options.values() for x in values]
    return f"click[{rng.choice(buttons)}]"


def _kind_of(env: WebShop, answer: str) -> str:
    if answer.startswith("search"):
        return "search"
    place = env.visit.place
    return {"results": "results", "item": "item", "bought": "buy"}.get(place, "sub-page")


def measure(num_episodes: int) -> dict[str, object]:
    """Actions per second, and the median time of each kind of page."""
    start = time.perf_counter()
    env = WebShop(max_turns=30)
    num_products = len(env.catalogue.products)
    open_s = time.perf_counter() - start
    rates, kinds, num_actions = [], {}, 0
    for _ in range(REPEATS):
        seconds: dict[str, list[float]] = defaultdict(list)
        for seed in range(num_episodes):
            browse(env, seed, seconds)
        times = [x for found in seconds.values() for x in found]
        rates.append(len(times) / sum(times))
        kinds = {kind: median(seconds[kind]) * 1e6 for kind in KINDS if seconds[kind]}
        num_actions = len(times)
    generated_catalogue.cache_clear()
    return {
        "num_products": num_products,
        "open_s": open_s,
        "num_actions": num_actions,
        "actions_per_s": max(rates),
        "target_per_s": TARGET_PER_S,
        "median_us": kinds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the web shop.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--episodes", type=int, default=400, help="visits, each repeated 3 times")
    args = parser.parse_args()
    found = measure(max(args.episodes, 1))
    print(f"{found['actions_per_s']:,.0f} actions/s, target {TARGET_PER_S:,.0f}")
    print(json.dumps(found, indent=2))
    if args.json:
        record = {
            "command": f"python benchmarks/webshop.py {' '.join(sys.argv[1:])}".strip(),
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "cores": os.cpu_count(),
            **found,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if float(str(found["actions_per_s"])) >= TARGET_PER_S else 1


if __name__ == "__main__":
    sys.exit(main())
