"""What the shop's demonstrations say: the goal, and what the page shows of it."""

from __future__ import annotations

import random

from moored.envs.mix import open_env
from moored.envs.webshop.env import WebShop
from moored.reply import format_reply, parse_reply
from moored.sft.demonstrations import play


def told(kind: str, seed: int) -> list[tuple[str, str, str]]:
    """(page, reasoning, action) of every turn of an episode."""
    with open_env(WebShop) as env:
        episode = play(env, seed, random.Random(seed), kind=kind, noise=0.5)  # pyright: ignore[reportArgumentType]
    assert episode.is_valid
    pages = [m.text for m in episode.messages if m.role == "user"]
    replies = [parse_reply(m.text) for m in episode.messages if m.role == "assistant"]
    return [(p, r.think or "", r.answer or "") for p, r in zip(pages, replies, strict=True)]


def test_every_reasoning_names_the_goal_or_what_is_pressed():
    for seed in range(5):
        first, *others = told("grounded", seed)
        assert first[1].startswith(("Wanted: ", "I need: "))
        assert first[2].startswith("search[") and first[2].count("[") == 1
        for page, think, action in others:
            pressed = action.removeprefix("click[").removesuffix("]")
            assert pressed in page
            if pressed not in ("Buy Now", "Next >", "< Prev", "Back to Search"):
                assert pressed in think
        assert "Chosen: " in others[-1][1] and others[-1][2] == "click[Buy Now]"


def test_reasoning_names_what_the_page_shows_of_the_goal_and_nothing_that_it_hides():
    env, rng = WebShop(max_turns=20), random.Random(0)
    env.reset(2)
    goal = env.goal
    env.step(format_reply("", f"search[{goal.title}]"))
    product = env.catalogue[goal.asin]
    shown = [fact for fact in goal.attributes if fact.title() in product.title]
    said = env.reasoning(f"click[{goal.asin}]", rng)
    assert said == f"{', '.join([*shown, product.price_tag])}: {goal.asin}."
    env.step(format_reply("", f"click[{goal.asin}]"))
    assert goal.options == ("rose", "8 fl oz")
    assert env.reasoning("click[rose]", rng).endswith("o choose: rose, 8 fl oz.")
    env.step(format_reply("", "click[rose]"))
    assert env.reasoning("click[8 fl oz]", rng).endswith("o choose: 8 fl oz.")
    env.step(format_reply("", "click[8 fl oz]"))
    assert env.reasoning("click[Buy Now]", rng).startswith("Chosen: rose, 8 fl oz. ")


def test_a_guess_presses_what_the_page_shows():
    for seed in range(5):
        for page, _, action in told("plain", seed):
            kind, pressed = action.removesuffix("]").split("[", 1)
            assert kind == "search" or f"[{pressed}]" in page
