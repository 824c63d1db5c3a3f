"""The pages of the shop as text, as the model reads them."""

from __future__ import annotations

from moored.envs.webshop.products import Product
from moored.envs.webshop.visit import Visit, Walk

MAX_QUERY_CHARS = 100
MAX_TITLE_CHARS = 200
MAX_TEXT_CHARS = 2000
MAX_VALUES = 40
MAX_REVIEWS = 5


def render_page(walk: Walk, visit: Visit) -> str:
    """What a page shows; buttons stand in square brackets."""
    body = {
        "search": _search_page,
        "results": _results_page,
        "item": _item_page,
        "bought": _bought_page,
    }.get(visit.place, _sub_page)(walk, visit)
    buttons = " ".join(f"[{name}]" for name in walk.buttons(visit))
    return f"{body}\n{buttons}" if buttons else body


def shorten(text: str, max_chars: int) -> str:
    """Cut a long text, and say so."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def sub_page_lines(product: Product, place: str) -> list[str]:
    """The texts of a sub-page, cut to a readable length."""
    if place == "description":
        lines = [product.description]
    elif place == "features":
        lines = list(product.features)
    else:
        reviews = product.reviews[:MAX_REVIEWS]
        lines = [f"{review.stars} stars: {review.title}. {review.body}" for review in reviews]
    share = MAX_TEXT_CHARS // max(len(lines), 1)
    return [shorten(" ".join(line.split()), share) for line in lines if line.strip()]


def product_line(product: Product) -> str:
    """A product on a page of results."""
    return f"[{product.asin}] {shorten(product.title, MAX_TITLE_CHARS)}, {product.price_tag}"


def _search_page(walk: Walk, visit: Visit) -> str:
    return "Search page. Nothing is shown before you search."


def _results_page(walk: Walk, visit: Visit) -> str:
    query = shorten(visit.query, MAX_QUERY_CHARS)
    if not visit.hits:
        return f"No results for {query!r}."
    first = visit.page * walk.results_per_page
    shown = [walk.catalogue[asin] for asin in walk.shown(visit)]
    lines = [product_line(product) for product in shown]
    count = f"{first + 1} to {first + len(shown)} of {len(visit.hits)}"
    place = f"page {visit.page + 1} of {walk.num_pages(visit)}"
    return "\n".join([f"Results for {query!r}, {count}, {place}:", *lines])


def _item_page(walk: Walk, visit: Visit) -> str:
    product = walk.product(visit)
    lines = [shorten(product.title, MAX_TITLE_CHARS), f"Price: {product.price_tag}"]
    if product.rating:
        lines.append(f"Rating: {product.rating} of 5")
    for name, values in product.options.items():
        listed = " ".join(f"[{value}]" for value in values[:MAX_VALUES])
        chosen = visit.chosen.get(name, "none")
        lines.append(f"{name}: {listed} (chosen: {chosen})")
    return "\n".join(lines)


def _sub_page(walk: Walk, visit: Visit) -> str:
    product = walk.product(visit)
    lines = sub_page_lines(product, visit.place) or ["There is nothing here."]
    head = f"{visit.place.capitalize()} of {shorten(product.title, MAX_TITLE_CHARS)}:"
    return "\n".join([head, *lines])


def _bought_page(walk: Walk, visit: Visit) -> str:
    product = walk.product(visit)
    options = ", ".join(f"{name}: {value}" for name, value in visit.chosen.items())
    return f"Bought {shorten(product.title, MAX_TITLE_CHARS)} ({options or 'no options'})."
