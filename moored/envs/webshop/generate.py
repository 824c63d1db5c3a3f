"""The shop that needs no download: a seeded catalogue of made products, and goals to buy them.

`goods.yaml` says what it may sell: kinds of products, their attributes, options and prices.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moored.envs.webshop.products import CATEGORY_MARK, Goal, Product, Review

GOALS_PER_PRODUCT = 4
LIMITS = tuple(10.0 * i for i in range(1, 100))
"""Price limits that a goal may name, as in WebShop."""
ASIN_LETTERS = "0123456789BCDFGHJKLMNPQRSTVWXYZ"
ONSETS = ("b", "br", "c", "d", "f", "gl", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ia", "ea")
CODAS = ("l", "n", "r", "x", "nd", "rk", "sta", "vo", "lo", "mi")
SERIES = ("Pro", "Lite", "Classic", "Prime", "Nova", "Origin", "Plus", "Urban", "Alto", "Core")
PRAISE = ("Better than I hoped", "Works for me", "Bought it twice", "Good value", "A nice gift")
BLAME = ("Not quite right", "Arrived late", "Expected more")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of product."""

    query: str
    names: list[str]
    """How titles call it."""
    uses: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Department:
    """Kinds that share attributes and options; the path of a product is `path › query`."""

    path: str
    attributes: list[str]
    options: Mapping[str, list[str]]
    prices: list[float]
    kinds: tuple[Kind, ...]


def _read_department(given: dict[str, Any]) -> Department:
    kinds = (Kind(query, **fields) for query, fields in given["kinds"].items())
    return Department(**{**given, "kinds": tuple(kinds)})


_GIVEN = yaml.safe_load(Path(__file__).with_name("goods.yaml").read_text(encoding="utf-8"))
DEPARTMENTS = tuple(map(_read_department, _GIVEN))


def generate_products(num_products: int, seed: int) -> list[Product]:
    """Made products, the kinds in turn, no two with one title or one number."""
    rng = random.Random(f"webshop products {seed}")
    kinds = [(department, kind) for department in DEPARTMENTS for kind in department.kinds]
    products: dict[str, Product] = {}
    asins: set[str] = set()
    while len(products) < num_products:
        department, kind = kinds[len(products) % len(kinds)]
        product = _make_product(rng, department, kind)
        if product.title not in products and product.asin not in asins:
            products[product.title] = product
            asins.add(product.asin)
    return list(products.values())


def generate_goals(products: Sequence[Product], seed: int) -> list[Goal]:
    """A few goals for each product; every one is met by its own product."""
    rng = random.Random(f"webshop goals {seed}")
    return [_make_goal(rng, product) for product in products for _ in range(GOALS_PER_PRODUCT)]


def draw_price_limit(rng: random.Random, price: float) -> float | None:
    """One of the next round prices above `price`, as WebShop draws it; None where there is none."""
    above = [limit for limit in LIMITS if limit > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else None


def describe_limit(limit: float | None) -> str:
    """How an instruction names its price limit."""
    return "" if limit is None else f", and price lower than {limit:.2f} dollars"


def _make_product(rng: random.Random, department: Department, kind: Kind) -> Product:
    name, use = rng.choice(kind.names), rng.choice(kind.uses)
    attributes = tuple(rng.sample(department.attributes, rng.randint(4, 6)))
    in_title, in_text = attributes[:2], attributes[2:]
    brand = _make_brand(rng)
    title = f"{brand} {rng.choice(SERIES)} {' '.join(in_title)} {name} for {use}".title()
    price = round(rng.uniform(*department.prices), 0) - 0.01
    options = {option: _pick_some(rng, values) for option, values in department.options.items()}
    reviews = tuple(_make_review(rng, name, attributes) for _ in range(rng.randint(0, 4)))
    stars = [int(review.stars) for review in reviews]
    return Product(
        asin="B0" + "".join(rng.choices(ASIN_LETTERS, k=8)),
        title=title,
        query=kind.query,
        product_category=f"{department.path} {CATEGORY_MARK} {kind.query.title()}",
        price=price,
        price_tag=f"${price:,.2f}",
        description=(
            f"The {brand} {name} is made for {use}. It comes with {in_text[-1]} and a guarantee of "
            f"{rng.randint(1, 5)} years."
        ),
        features=tuple(_make_feature(rng, attribute, use) for attribute in (*in_text, in_title[0])),
        attributes=attributes,
        options=options,
        reviews=reviews,
        rating=f"{sum(stars) / len(stars):.1f}" if stars else "",
    )


def _make_goal(rng: random.Random, product: Product) -> Goal:
    attributes = tuple(rng.sample(product.attributes, rng.randint(1, 3)))
    options = {
        name: rng.choice(values) for name, values in product.options.items() if rng.random() < 0.8
    }
    limit = draw_price_limit(rng, product.price)
    return Goal(
        asin=product.asin,
        instruction=_instruct(rng, product.query, attributes, options) + describe_limit(limit),
        title=product.title,
        query=product.query,
        product_category=product.product_category,
        attributes=attributes,
        options=tuple(options.values()),
        price_limit=limit,
    )


def _instruct(
    rng: random.Random, query: str, attributes: Sequence[str], options: dict[str, str]
) -> str:
    facts = _join(attributes)
    lead = rng.choice(
        (
            f"find me {query} with {facts}",
            f"i am looking for {query} that have {facts}",
            f"i need {', '.join(attributes)} {query}",
            f"i would like to buy {query}, {facts}",
        )
    )
    wanted = [f"{name}: {value}" for name, value in options.items()]
    return f"{lead}, with {_join(wanted)}" if wanted else lead


def _join(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _pick_some(rng: random.Random, values: Sequence[str]) -> tuple[str, ...]:
    """Two to six of the values, in their order."""
    picked = set(rng.sample(values, rng.randint(2, min(6, len(values)))))
    return tuple(value for value in values if value in picked)


def _make_brand(rng: random.Random) -> str:
    first = rng.choice(ONSETS) + rng.choice(VOWELS)
    return (first + rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)).capitalize()


def _make_feature(rng: random.Random, attribute: str, use: str) -> str:
    lead = attribute.capitalize()
    return rng.choice(
        (
            f"{lead}: you will notice it at once.",
            f"{lead}, tested for {use}.",
            f"{lead} that lasts for years.",
            f"Known for {attribute}.",
        )
    )


def _make_review(rng: random.Random, name: str, attributes: Sequence[str]) -> Review:
    stars = rng.choice((5, 5, 4, 4, 3, 2))
    if stars > 2:
        return Review(
            rng.choice(PRAISE), f"The {name}: {rng.choice(attributes)}, as told.", f"{stars}"
        )
    return Review(rng.choice(BLAME), f"I sent the {name} back.", f"{stars}")
