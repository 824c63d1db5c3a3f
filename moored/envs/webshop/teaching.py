"""What a buyer thinks on a page of the shop, and what else could be pressed there."""

from __future__ import annotations

import random

from moored.envs.teaching import fill
from moored.envs.webshop.oracle import fitting_options
from moored.envs.webshop.products import Goal, Product
from moored.envs.webshop.visit import BUY, Action, Visit, Walk


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
