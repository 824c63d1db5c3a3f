"""WebShop's own files, read as they are.

`items_shuffle*.json` has the products, `items_ins_v2*.json` their attributes and made instructions,
`items_human_ins*.json` the instructions that people wrote. Products may also come as JSON lines,
as rows or as documents of the search index (`{"id", "contents", "product"}`).
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moored.envs.record_files import file_key, read_records
from moored.envs.webshop.generate import describe_limit, draw_price_limit
from moored.envs.webshop.products import Goal, Product, product_from_row
from moored.errors import EnvError

MAX_GOALS_PER_PRODUCT = 20
"""Made goals of one product: some have thousands of combinations of options."""
MAX_ASIN_CHARS = 10


def load_products(
    path: str | Path, attributes_path: str | Path | None = None, num_products: int | None = None
) -> list[Product]:
    """The first `num_products` products (all with None), each number once; raises EnvError."""
    attributes = {} if attributes_path is None else _read_mapping(attributes_path)
    products: dict[str, Product] = {}
    for row in _product_rows(path):
        asin = str(row.get("asin", ""))
        if not asin or asin == "nan" or len(asin) > MAX_ASIN_CHARS or asin in products:
            continue
        own = attributes.get(asin, {}).get("attributes")
        products[asin] = product_from_row(row, own)
        if len(products) == num_products:
            break
    if not products:
        raise EnvError(f"'{path}' has no products with a number ('asin'); give items_shuffle.json")
    return list(products.values())


def load_goals(
    products: Sequence[Product],
    products_path: str | Path,
    attributes_path: str | Path | None,
    human_path: str | Path | None,
) -> list[Goal]:
    """Goals that people wrote where that file is given, else the made ones; raises EnvError."""
    goals: list[Goal] = []
    if human_path is not None:
        written = _read_mapping(human_path)
        for product in products:
            goals += _human_goals(product, written.get(product.asin, []))
    elif attributes_path is not None:
        rows = _read_mapping(attributes_path)
        for product in products:
            goals += _made_goals(product, rows.get(product.asin, {}))
    if not goals:
        what = "human_goals" if human_path is not None else "attributes"
        given = human_path if human_path is not None else attributes_path
        raise EnvError(
            f"none of the {len(products)} products of '{products_path}' has a goal; give the file "
            f"that has instructions for them as {what}, got {str(given)!r}"
        )
    return goals


def _human_goals(product: Product, rows: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    for number, row in enumerate(rows):
        attributes = row.get("instruction_attributes")
        if not attributes:  # as in WebShop: nothing to judge a purchase by
            continue
        options = [option for option in row.get("instruction_options") or [] if option]
        yield _goal(product, str(row.get("instruction", "")), attributes, options, number)


def _made_goals(product: Product, row: Mapping[str, Any]) -> Iterator[Goal]:
    """One goal per combination of options, of which at most some are drawn."""
    instruction, attributes = row.get("instruction"), row.get("instruction_attributes")
    if not instruction or not attributes:
        return
    names = sorted(product.options)
    combinations = itertools.product(*(product.options[name] for name in names))
    first = list(itertools.islice(combinations, 10_000))
    if len(first) > MAX_GOALS_PER_PRODUCT:
        first = random.Random(product.asin).sample(first, MAX_GOALS_PER_PRODUCT)
    for number, values in enumerate(first):
        wanted = ", and ".join(
            f"{name}: {value}" for name, value in zip(names, values, strict=True)
        )
        text = f"{instruction} with {wanted}" if wanted else instruction
        yield _goal(product, text, attributes, values, number)


def _goal(
    product: Product,
    instruction: str,
    attributes: Sequence[str],
    options: Sequence[str],
    number: int,
) -> Goal:
    # WebShop draws limits anew in every process; here a goal is always the same.
    limit = draw_price_limit(random.Random(f"{product.asin} {number}"), product.price)
    return Goal(
        asin=product.asin,
        instruction=instruction.strip().strip(".") + describe_limit(limit),
        title=product.title,
        query=product.query,
        product_category=product.product_category,
        attributes=tuple(attributes),
        options=tuple(options),
        price_limit=limit,
    )


def _product_rows(path: str | Path) -> Iterator[Mapping[str, Any]]:
    file, *_ = file_key(path)
    for _, row in read_records(file):
        inner = row.get("product")
        yield inner if isinstance(inner, dict) else row


def _read_mapping(path: str | Path) -> Mapping[str, Any]:
    file, *_ = file_key(path)
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # of the text, or of the JSON
        raise EnvError(f"'{path}' is not complete JSON ({error}); download it again") from error
    if not isinstance(rows, dict):
        raise EnvError(
            f"'{path}' must map product numbers to instructions, got a {type(rows).__name__}; give "
            f"items_ins_v2.json or items_human_ins.json"
        )
    return rows
