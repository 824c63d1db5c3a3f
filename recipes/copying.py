"""Dialogues that exercise copying, of made-up worlds and shops that no task is about.

    python recipes/copying.py --out copying.jsonl
    python recipes/copying.py --task webshop_clicks --out copying.jsonl
    moored sft MODEL dialogues=copying.jsonl

`search`: a passage, and its sentences in another order. `webshop_lines`: lines of products as a
page of results shows them, in another order. `webshop_clicks`: one such line, with or without the
title, and a click on the product. Both of these also have instructions, with what is wanted and a
search for it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from moored.envs.search.world import make_world
from moored.envs.webshop.generate import generate_goals, generate_products
from moored.envs.webshop.pages import product_line
from moored.envs.webshop.products import Goal, Product
from moored.reply import format_reply

Dialogue = dict[str, str]

SEEDS = (1, 2, 3)
"""Of worlds and shops; the tasks have 0."""
NUM_PRODUCTS = 6000
LINES = 3
"""Products of one dialogue."""


def passage_dialogues(seeds: Sequence[int], rng: random.Random) -> Iterator[Dialogue]:
    """One dialogue per passage, as `moored sft` reads them."""
    for seed in seeds:
        for passage in make_world(seed).passages:
            sentences = [found.strip() for found in re.findall(r"[^.]+\.", passage.text)]
            again = rng.sample(sentences, len(sentences))
            prompt = f"[1] {passage.title}\n{passage.text}"
            yield {"prompt": prompt, "completion": " ".join(again)}


def line_dialogues(seeds: Sequence[int], rng: random.Random) -> Iterator[Dialogue]:
    """Every product of a shop once, `LINES` at a time; and a goal for each product."""
    for seed in seeds:
        products = generate_products(NUM_PRODUCTS, seed)
        lines = [product_line(product) for product in products]
        rng.shuffle(lines)
        for first in range(0, len(lines), LINES):
            some = lines[first : first + LINES]
            again = rng.sample(some, len(some))
            yield {"prompt": "\n".join(some), "completion": "\n".join(again)}
        yield from map(_search, rng.sample(generate_goals(products, seed), len(products)))


def click_dialogues(seeds: Sequence[int], rng: random.Random) -> Iterator[Dialogue]:
    """Every product of a shop once, most of them without a title; and a goal for one in three."""
    dialogues: list[Dialogue] = []
    for seed in seeds:
        products = generate_products(NUM_PRODUCTS, seed)
        dialogues += [_click(product, is_short=rng.random() >= 0.3) for product in products]
        goals = rng.sample(generate_goals(products, seed), len(products) // 3)
        dialogues += map(_search, goals)
    rng.shuffle(dialogues)
    return iter(dialogues)


def _click(product: Product, *, is_short: bool) -> Dialogue:
    line = f"[{product.asin}], {product.price_tag}" if is_short else product_line(product)
    reply = format_reply(f"{product.asin}: {product.price_tag}.", f"click[{product.asin}]")
    return {"prompt": line, "completion": reply}


def _search(goal: Goal) -> Dialogue:
    facts = (goal.query, *goal.attributes, *goal.options)
    reply = format_reply(f"Wanted: {', '.join(facts)}.", f"search[{' '.join(facts)}]")
    return {"prompt": f"Instruction: {goal.instruction}", "completion": reply}


TASKS: Mapping[str, Callable[[Sequence[int], random.Random], Iterator[Dialogue]]] = {
    "search": passage_dialogues,
    "webshop_lines": line_dialogues,
    "webshop_clicks": click_dialogues,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write dialogues that exercise copying.")
    parser.add_argument("--task", choices=sorted(TASKS), default="search")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per dialogue")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of worlds or shops")
    parser.add_argument("--seed", type=int, default=0, help="of the order of what is copied")
    options = parser.parse_args()
    lines = map(json.dumps, TASKS[options.task](options.seeds, random.Random(options.seed)))
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
