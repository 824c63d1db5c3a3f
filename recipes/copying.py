"""Dialogues to learn from that `moored sft` does not make by itself, for `dialogues=FILE`.

    python recipes/copying.py --out copying.jsonl
    python recipes/copying.py --task webshop --out shop.jsonl
    moored sft MODEL dialogues=copying.jsonl

`search`: passages of worlds that no task is about, with their sentences in another order.
`webshop`: episodes of train tasks; for every product of that shop, the line of a page of results
and a click on it, since a small model learns product numbers by heart sooner than to copy them;
and instructions of another shop, with what is wanted and a search for it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moored.envs.base import FORMAT_REMINDER, SPLIT_SEEDS
from moored.envs.search.world import make_world
from moored.envs.webshop.env import WebShop
from moored.envs.webshop.generate import generate_goals, generate_products
from moored.envs.webshop.pages import product_line
from moored.envs.webshop.products import Goal, Product
from moored.envs.webshop.visit import BACK, NEXT
from moored.reply import format_reply
from moored.sft.demonstrations import play

Dialogue = dict[str, object]

WORLD_SEEDS = (1, 2, 3)
"""Of `search`; the world of its tasks has 0."""
OTHER_SHOP_SEED = 1
NUM_EPISODES, NUM_CLICKS, NUM_SEARCHES = 1500, 40, 1500
"""Of the shop; clicks are per product."""
LINE_SHARE = 0.6
"""How often a page of practice has each of the lines around its product."""


def passage_dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """One dialogue per passage, as `moored sft` reads them."""
    for seed in WORLD_SEEDS:
        for passage in make_world(seed).passages:
            sentences = [found.strip() for found in re.findall(r"[^.]+\.", passage.text)]
            again = rng.sample(sentences, len(sentences))
            prompt = f"[1] {passage.title}\n{passage.text}"
            yield {"prompt": prompt, "completion": " ".join(again)}


def open_shop() -> WebShop:
    """The shop of `recipes/webshop.yaml`."""
    return WebShop(num_products=150, results_per_page=1, max_turns=8)


def shop_dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Episodes, clicks and searches in random order; nothing of validation or test goals."""
    env = open_shop()
    tasks = rng.sample(SPLIT_SEEDS["train"], NUM_EPISODES)
    dialogues = [_episode(env, task, rng) for task in tasks]
    products = env.catalogue.products * NUM_CLICKS
    dialogues += [_click(product, rng) for product in products]
    others = generate_goals(generate_products(1200, OTHER_SHOP_SEED), OTHER_SHOP_SEED)
    dialogues += map(_search, rng.sample(others, NUM_SEARCHES))
    rng.shuffle(dialogues)
    return iter(dialogues)


def _episode(env: WebShop, task_seed: int, rng: random.Random) -> Dialogue:
    messages = play(env, task_seed, rng).messages
    return {"messages": [message.to_dict() for message in messages]}


def _click(product: Product, rng: random.Random) -> Dialogue:
    lines = [
        f"Results for '{product.query}', 1 to 1 of 50, page 1 of 50:",
        product_line(product),
        f"[{BACK}] [{NEXT}]",
        f"{FORMAT_REMINDER}.",
    ]
    shown = [line for i, line in enumerate(lines) if i == 1 or rng.random() < LINE_SHARE]
    reply = format_reply(f"{product.price_tag}: {product.asin}.", f"click[{product.asin}]")
    return {"prompt": "\n".join(shown), "completion": reply}


def _search(goal: Goal) -> Dialogue:
    facts = (goal.query, *goal.attributes, *goal.options)
    reply = format_reply(f"Wanted: {', '.join(facts)}.", f"search[{' '.join(facts)}]")
    return {"prompt": f"Instruction: {goal.instruction}", "completion": reply}


TASKS: Mapping[str, Callable[[random.Random], Iterator[Dialogue]]] = {
    "search": passage_dialogues,
    "webshop": shop_dialogues,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write dialogues for `moored sft dialogues=FILE`.")
    parser.add_argument("--task", choices=sorted(TASKS), default="search")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per dialogue")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = map(json.dumps, TASKS[options.task](random.Random(options.seed)))
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
