"""Good actions in the shop: search by the words of the goal, choose the options, buy.

`explain` says what a buyer thinks on a page, `guess` what else could be pressed there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from moored.envs.teaching import fill
from moored.envs.webshop.matching import is_close, normalize_colour
from moored.envs.webshop.products import Goal, Product
from moored.envs.webshop.score import purchase_score
from moored.envs.webshop.visit import BACK, BUY, NEXT, PREV, Action, Visit, Walk


def next_action(walk: Walk, visit: Visit, goal: Goal, num_turns: int) -> Action:
    """What to do on this page to buy something of full score, or the goal's own product.

    `num_turns` is how many actions are left, this one included.
    """
    if visit.place == "search":
        return Action("search", _best_query(walk, goal, num_turns))
    if visit.place == "results":
        return _from_results(walk, visit, goal, num_turns)
    product = walk.product(visit)
    if not _is_target(product, goal):
        return Action("click", BACK)
    if visit.place != "item":
        return Action("click", PREV)
    for name, value in fitting_options(product, goal).items():
        if visit.chosen.get(name) != value:
            return Action("click", value)
    return Action("click", BUY)


def fitting_options(product: Product, goal: Goal) -> dict[str, str]:
    """Options of the product for those of the goal; equal values come before close ones."""
    chosen: dict[str, str] = {}
    missing = list(goal.options)
    for fits in (_is_equal, _is_close_option):
        for wanted in list(missing):
            found = _find_option(product.options, chosen, wanted, fits)
            if found is not None:
                chosen[found[0]] = found[1]
                missing.remove(wanted)
    return chosen


def earns_full_score(product: Product, goal: Goal) -> bool:
    """True when buying the product, with its best options, meets the whole goal."""
    options = fitting_options(product, goal)
    return purchase_score(product, goal, options, product.price).is_full


def _best_query(walk: Walk, goal: Goal, num_turns: int) -> str:
    """Words of the instruction, or the title where they do not lead to a purchase in time."""
    words = " ".join((goal.query, *goal.attributes, *goal.options))
    place = _find_target(walk, walk.catalogue.search(words), goal)
    # A search, a click on the product, one for each option, and the purchase.
    num_spare = num_turns - 3 - len(goal.options)
    is_near = place is not None and place // walk.results_per_page <= max(0, num_spare)
    return words if is_near else goal.title


def _from_results(walk: Walk, visit: Visit, goal: Goal, num_turns: int) -> Action:
    place = _find_target(walk, visit.hits, goal)
    if place is None:
        return Action("search", _best_query(walk, goal, num_turns))
    page = place // walk.results_per_page
    if page == visit.page:
        return Action("click", visit.hits[place])
    return Action("click", NEXT if page > visit.page else PREV)


def _find_target(walk: Walk, hits: Sequence[str], goal: Goal) -> int | None:
    """Where the first product of full score stands among the hits."""
    targets = (place for place, x in enumerate(hits) if _is_target(walk.catalogue[x], goal))
    return next(targets, None)


def _is_target(product: Product, goal: Goal) -> bool:
    return product.asin == goal.asin or earns_full_score(product, goal)


def _find_option(
    options: Mapping[str, tuple[str, ...]],
    chosen: Mapping[str, str],
    wanted: str,
    fits: Callable[[str, str], bool],
) -> tuple[str, str] | None:
    for name, values in options.items():
        if name not in chosen:
            for value in values:
                if fits(value, wanted):
                    return name, value
    return None


def _is_equal(value: str, wanted: str) -> bool:
    return value.casefold() == wanted.casefold()


def _is_close_option(value: str, wanted: str) -> bool:
    return is_close(normalize_colour(value), normalize_colour(wanted))


def explain(walk: Walk, visit: Visit, goal: Goal, action: Action, rng: random.Random) -> str:
    """What of the goal this page shows or asks for, and so what to do."""
    if action.verb == "search":
        facts = ", ".join((goal.query, *goal.attributes, *goal.options))
        return f"{fill('{Wanted|I need}', rng)}: {facts}."
    if visit.place == "results" and action.argument in walk.shown(visit):
        return _describe(walk.catalogue[action.argument], goal)
    if visit.place == "item" and action.argument == BUY:
        chosen = ", ".join(visit.chosen.values()) or "nothing"
        return f"Chosen: {chosen}. {fill('{That is all|Now I buy it}', rng)}."
    if visit.place == "item" and _is_option(walk, visit, action.argument):
        wanted = fitting_options(walk.product(visit), goal).items()
        missing = [value for name, value in wanted if visit.chosen.get(name) != value]
        return f"{fill('{To choose|Still to choose}', rng)}: {', '.join(missing) or 'nothing'}."
    return f"{fill('{It is not here|This page does not show it}', rng)}."


def _describe(product: Product, goal: Goal) -> str:
    """What of the goal the line of a product names, its price, and so its number."""
    named = [fact for fact in goal.attributes if fact in product.title.lower()]
    return f"{', '.join([*named, product.price_tag])}: {product.asin}."


def guess(walk: Walk, visit: Visit, goal: Goal, rng: random.Random) -> Action:
    """Anything that the page offers; where it offers nothing, a search for the kind of product."""
    offered = list(walk.buttons(visit))
    if visit.place == "results":
        offered += walk.shown(visit)
    if visit.place == "item":
        options = walk.product(visit).options.values()
        offered += [value for values in options for value in values]
    if not offered:
        return Action("search", goal.query)
    return Action("click", rng.choice(offered))


def _is_option(walk: Walk, visit: Visit, value: str) -> bool:
    return any(value in values for values in walk.product(visit).options.values())
