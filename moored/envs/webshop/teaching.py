"""What a buyer thinks on a page of the shop, and what else could be pressed there."""

from __future__ import annotations

import random

from moored.envs.teaching import fill
from moored.envs.webshop.products import Goal
from moored.envs.webshop.visit import BUY, Action, Visit, Walk


def explain(walk: Walk, visit: Visit, goal: Goal, action: Action, rng: random.Random) -> str:
    """What is wanted, what of it the page shows, and so what to do."""
    facts = ", ".join((goal.query, *goal.attributes, *goal.options))
    wanted = f"{fill('{Wanted|I need}', rng)}: {facts}."
    if action.verb == "search":
        return f"{wanted} {fill('{I search for it|First a search}', rng)}."
    if visit.place == "results" and action.argument in walk.shown(visit):
        product = walk.catalogue[action.argument]
        return f"{wanted} {action.argument} is {product.title}, ${product.price:.2f}."
    if visit.place == "item" and action.argument == BUY:
        chosen = ", ".join(visit.chosen.values()) or "nothing to choose"
        return f"{wanted} Chosen: {chosen}. {fill('{That is all|Now I buy it}', rng)}."
    if visit.place == "item" and _is_option(walk, visit, action.argument):
        return f"{wanted} {action.argument} is {fill('{asked for|still to choose}', rng)}."
    return f"{wanted} {fill('{It is not here|This page does not show it}', rng)}."


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
