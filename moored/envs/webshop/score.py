"""The official score of a purchase.

total = r_type * (attribute matches + option matches + [price is fine]) /
        (number of attributes + number of options + 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moored.envs.webshop.matching import NounFinder, find_nouns, is_close, normalize_colour
from moored.envs.webshop.products import Goal, Product, category_levels


@dataclass(frozen=True, slots=True)
class PurchaseScore:
    """How well a purchase fits a goal, part by part."""

    r_type: float
    """1, 0.5, 0.1 or 0: is it the kind of product that was asked for?"""
    attribute_matches: int
    option_matches: int
    price_ok: bool
    total: float
    """0 to 1."""

    @property
    def is_full(self) -> bool:
        return self.total == 1.0


def purchase_score(
    product: Product,
    goal: Goal,
    options: Mapping[str, str] | Sequence[str],
    price: float,
    *,
    nouns: NounFinder = find_nouns,
) -> PurchaseScore:
    """Score the purchase of `product` with the chosen `options` (by name, or values) at `price`.

    `nouns` finds the nouns of a title: spaCy's small English model where it is installed, else all
    content words.
    """
    chosen = list(options.values()) if isinstance(options, Mapping) else list(options)
    r_type = type_score(product, goal, nouns)
    num_attributes = _count_attributes(product, goal.attributes)
    num_options = _count_options(chosen, goal.options)
    price_ok = goal.price_limit is None or price <= goal.price_limit
    wanted = len(goal.attributes) + len(goal.options) + 1
    total = r_type * ((num_attributes + num_options + price_ok) / wanted)
    return PurchaseScore(r_type, num_attributes, num_options, price_ok, total)


def type_score(product: Product, goal: Goal, nouns: NounFinder = find_nouns) -> float:
    """1 for the right kind of product; 0.5, 0.1 or 0 the less the titles have in common."""
    wanted, found = nouns(goal.title), nouns(product.title)
    # A goal title without nouns counts as 0.2, which alone is not enough.
    overlap = len(set(wanted) & set(found)) / len(wanted) if wanted else 0.2
    if overlap == 0.0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    shared = category_levels(product.product_category) & category_levels(goal.product_category)
    is_same_kind = product.query == goal.query or len(shared) >= 2 or overlap > 0.2
    return 1.0 if is_same_kind else 0.5


def _count_attributes(product: Product, wanted: Sequence[str]) -> int:
    """Attributes that the product's own list has, or its title, features or description name."""
    texts = [product.title, " ".join(product.features), product.description]
    texts = [text.lower() for text in texts]
    return sum(
        any(is_close(own, attribute) for own in product.attributes)
        or any(attribute in text for text in texts)
        for attribute in wanted
    )


def _count_options(chosen: Sequence[str], wanted: Sequence[str]) -> int:
    """Wanted options that are close to a chosen one."""
    colours = [normalize_colour(value) for value in chosen]
    return sum(any(is_close(own, normalize_colour(x)) for own in colours) for x in wanted)
