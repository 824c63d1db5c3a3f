"""Where a visitor of the shop is, and where an action leads.

A `Visit` is plain data; `follow` returns the next one. The text pages, the web page and the oracle
all read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from moored.envs.brackets import holds_two
from moored.envs.webshop.products import Product
from moored.envs.webshop.shop import Catalogue

Place = Literal["search", "results", "item", "description", "features", "reviews", "bought"]

BUY, BACK, NEXT, PREV = "Buy Now", "Back to Search", "Next >", "< Prev"
SUB_PAGES: Mapping[str, Place] = {
    "Description": "description",
    "Features": "features",
    "Reviews": "reviews",
}
MAX_ACTION_CHARS = 2000
ACTION = re.compile(r"(search|click)\[(.*)\]", re.IGNORECASE | re.DOTALL)
VERBS = ("search", "click")


@dataclass(frozen=True, slots=True)
class Action:
    """`search[argument]` or `click[argument]`."""

    verb: Literal["search", "click"]
    argument: str

    def __str__(self) -> str:
        return f"{self.verb}[{self.argument}]"


@dataclass(frozen=True, slots=True)
class Visit:
    """One page of the shop, and how the visitor got there."""

    place: Place = "search"
    query: str = ""
    hits: tuple[str, ...] = ()
    """Numbers of the products that the last search found."""
    page: int = 0
    """Of the results, from 0."""
    asin: str = ""
    """The product that is looked at, or was bought."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Options of that product, by name."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The rules of moving around in one shop."""

    catalogue: Catalogue
    results_per_page: int

    def follow(self, visit: Visit, action: Action) -> Visit | None:
        """The next page; None when this page has no such button."""
        if action.verb == "search":
            hits = self.catalogue.search(action.argument)
            return Visit(place="results", query=action.argument, hits=hits)
        wanted = action.argument.casefold()
        button = next((x for x in self.buttons(visit) if x.casefold() == wanted), None)
        if button is not None:
            return self._press(visit, button)
        if visit.place == "results":
            asin = next((x for x in self.shown(visit) if x.casefold() == wanted), None)
            return None if asin is None else replace(visit, place="item", asin=asin, chosen={})
        if visit.place == "item":
            return _choose(visit, self.product(visit), wanted)
        return None

    def buttons(self, visit: Visit) -> list[str]:
        """The buttons of a page, other than products and options."""
        if visit.place in ("search", "bought"):
            return []
        if visit.place == "results":
            has_prev, has_next = visit.page > 0, visit.page + 1 < self.num_pages(visit)
            return [BACK] + [PREV] * has_prev + [NEXT] * has_next
        if visit.place == "item":
            return [BACK, PREV, *SUB_PAGES, BUY]
        return [BACK, PREV]

    def shown(self, visit: Visit) -> tuple[str, ...]:
        """Numbers of the products on this page of the results."""
        first = visit.page * self.results_per_page
        return visit.hits[first : first + self.results_per_page]

    def num_pages(self, visit: Visit) -> int:
        return -(-len(visit.hits) // self.results_per_page)

    def product(self, visit: Visit) -> Product:
        return self.catalogue[visit.asin]

    def _press(self, visit: Visit, button: str) -> Visit:
        if button == BACK:
            return Visit()
        if button == BUY:
            return replace(visit, place="bought")
        if button in SUB_PAGES:
            return replace(visit, place=SUB_PAGES[button])
        if button == NEXT:
            return replace(visit, page=visit.page + 1)
        if visit.place == "results":
            return replace(visit, page=visit.page - 1)
        if visit.place == "item":
            return replace(visit, place="results", asin="", chosen={})
        return replace(visit, place="item")


def parse_action(answer: str) -> Action | None:
    """Read `search[words]` or `click[button]`, the verb in any case.

    None when it is neither, or more than one action.
    """
    if len(answer) > MAX_ACTION_CHARS:
        return None
    found = ACTION.fullmatch(answer.strip())
    if found is None or not found[2].strip() or holds_two(found[2], VERBS):
        return None
    verb = "search" if found[1].lower() == "search" else "click"
    return Action(verb, found[2].strip())


def _choose(visit: Visit, product: Product, wanted: str) -> Visit | None:
    """Choose an option by its value; one that two options share goes to the one without it."""
    names = [
        (name, value)
        for name, values in product.options.items()
        for value in values
        if value.casefold() == wanted
    ]
    if not names:
        return None
    free = [(name, value) for name, value in names if visit.chosen.get(name) != value]
    name, value = (free or names)[0]
    return replace(visit, chosen={**visit.chosen, name: value})
