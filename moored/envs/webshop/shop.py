"""The shop that all episodes of a run share: products, goals and the search index."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moored.envs.base import Resource, warn_of_missing_splits
from moored.envs.webshop.generate import generate_goals, generate_products
from moored.envs.webshop.official import load_goals, load_products
from moored.envs.webshop.products import Goal, Product
from moored.envs.webshop.search import SearchIndex

MAX_HITS = 50
"""Products that a search returns at most, as in WebShop."""
NUM_GENERATED = 1200


class Catalogue:
    """Products and goals, with an index over everything that the pages say."""

    def __init__(self, products: Sequence[Product], goals: Sequence[Goal]) -> None:
        self.products = tuple(products)
        self.goals = tuple(goals)
        self.split_keys = _split_keys(self.goals)
        """Number of a product -> what decides the split of its goals."""
        self._places = {product.asin: place for place, product in enumerate(self.products)}
        self._index = SearchIndex(map(_searchable_text, self.products))

    def search(self, query: str) -> tuple[str, ...]:
        """Numbers of the products that fit best, best first."""
        return tuple(self.products[hit].asin for hit in self._index.search(query, MAX_HITS))

    def __getitem__(self, asin: str) -> Product:
        return self.products[self._places[asin]]


@dataclass
class Shop(Resource):
    """Opens the generated catalogue, or the one in WebShop's own files."""

    products: str | Path | None = None
    attributes: str | Path | None = None
    human_goals: str | Path | None = None
    num_products: int | None = None
    catalogue_seed: int = 0

    def open(self) -> None:
        if self.products is None:
            num_products = self.num_products or NUM_GENERATED
            self.catalogue = generated_catalogue(num_products, self.catalogue_seed)
            return
        products = load_products(self.products, self.attributes, self.num_products)
        goals = load_goals(products, self.products, self.attributes, self.human_goals)
        self.catalogue = Catalogue(products, goals)
        keys = self.catalogue.split_keys.values()
        warn_of_missing_splits(self.products, f"{len(goals)} goals", keys)

    def close(self) -> None:
        del self.catalogue


@functools.lru_cache(maxsize=4)
def generated_catalogue(num_products: int, seed: int) -> Catalogue:
    """The made products and goals; a repeated call is free."""
    products = generate_products(num_products, seed)
    return Catalogue(products, generate_goals(products, seed))


def _split_keys(goals: Sequence[Goal]) -> dict[str, str]:
    """For every product the first one that it shares an instruction with, directly or by others.

    Two products may be asked for in the same words, and such goals are one task.
    """
    above: dict[str, str] = {}
    first: dict[str, str] = {}

    def top(asin: str) -> str:
        while above[asin] != asin:
            above[asin] = asin = above[above[asin]]
        return asin

    for goal in goals:
        above.setdefault(goal.asin, goal.asin)
        one, other = top(first.setdefault(goal.instruction, goal.asin)), top(goal.asin)
        above[other] = one
    return {asin: top(asin) for asin in above}


def _searchable_text(product: Product) -> str:
    options = " ".join(value for values in product.options.values() for value in values)
    parts = (product.title, product.query, product.description, *product.features, options)
    return " ".join(parts)
