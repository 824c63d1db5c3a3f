"""What the shop sells and what a customer wants: `Product`, `Review` and `Goal`.

`product_from_row` reads a product from a dict as WebShop's own files and code write it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moored.errors import EnvError

CATEGORY_MARK = "›"
DEFAULT_PRICE = 100.0
"""What a product without a price costs in WebShop."""


@dataclass(frozen=True, slots=True)
class Review:
    """What a customer wrote, and the stars given."""

    title: str
    body: str
    stars: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One item of the shop."""

    asin: str
    """Its number, which is also the button that opens its page."""
    title: str
    query: str
    """What one searches for to find this kind of product, such as `console tables`."""
    product_category: str
    """The path in the catalogue, levels parted by `›`."""
    price: float
    """What a purchase costs."""
    price_tag: str
    """The price as the page shows it: `$19.99`, or `$19.99 to $27.99`."""
    description: str = ""
    features: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    """Short facts that the score looks for; no page shows this list."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name -> values to choose from, in lower case."""
    reviews: tuple[Review, ...] = ()
    rating: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What to buy: an instruction for the buyer, and the facts that a purchase is judged by."""

    asin: str
    """The product that the goal was written for; another one may serve as well."""
    instruction: str
    title: str
    query: str
    product_category: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Values to choose, such as `blue` and `x-large`."""
    price_limit: float | None = None
    """The highest price that is fine; None: any."""


def product_from_row(row: Mapping[str, Any], attributes: Sequence[str] | None = None) -> Product:
    """A product of `items_shuffle*.json`, or of WebShop's loaded products; raises EnvError.

    `attributes` come from another file there; None: those in the row, if any.
    """
    title = row.get("Title") or row.get("name")
    if not isinstance(title, str) or not title:
        raise EnvError(f"a WebShop product needs a 'name', got the keys {sorted(row)!r:.120}")
    prices = _prices(row.get("pricing"))
    features = row.get("BulletPoints", row.get("small_description"))
    found = row.get("Attributes") if attributes is None else attributes
    rating = row.get("Rating") or row.get("average_rating")
    return Product(
        asin=str(row.get("asin", "")),
        title=title,
        query=str(row.get("query", "")).lower().strip(),
        product_category=str(row.get("product_category", "")),
        # The highest of a range: then the page shows what a purchase can cost.
        price=prices[-1],
        price_tag=" to ".join(f"${price:,.2f}" for price in prices),
        description=str(row.get("Description", row.get("full_description")) or ""),
        features=tuple(map(str, [features] if isinstance(features, str) else features or [])),
        attributes=tuple(map(str, found or [])),
        options=_options(row),
        reviews=tuple(_review(review) for review in row.get("Reviews") or []),
        rating="" if rating in (None, "", "N.A.") else str(rating),
    )


def category_levels(path: str) -> set[str]:
    """The levels of a category path."""
    return {level.strip() for level in path.split(CATEGORY_MARK)}


def _prices(pricing: object) -> list[float]:
    """One price, or the two ends of a range: from `$19.99$27.99`, or from numbers."""
    if isinstance(pricing, str):
        found = [re.sub(r"[^0-9.]", "", part) for part in pricing.split("$")[1:]]
        prices = [float(text) for text in found if re.fullmatch(r"[0-9]+\.?[0-9]*", text)]
    elif isinstance(pricing, Sequence):
        prices = [float(price) for price in pricing]
    else:
        prices = []
    prices = sorted(price for price in prices[:2] if math.isfinite(price))
    return prices or [DEFAULT_PRICE]


def _options(row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if isinstance(row.get("options"), Mapping):
        return {name: tuple(values) for name, values in row["options"].items() if values}
    found = row.get("customization_options")
    if not isinstance(found, Mapping):
        return {}
    return {
        name.lower(): tuple(dict.fromkeys(_option_value(entry["value"]) for entry in entries))
        for name, entries in found.items()
        if entries
    }


def _option_value(text: str) -> str:
    return text.strip().replace("/", " | ").lower()


def _review(row: Mapping[str, Any]) -> Review:
    return Review(
        title=str(row.get("title", "")),
        body=str(row.get("body", row.get("review")) or ""),
        stars=str(row.get("score", row.get("stars")) or ""),
    )
