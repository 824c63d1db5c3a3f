"""The shop as an environment: pages, actions, rewards and the oracle."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace

import pytest

from moored.envs import StepResult, format_reply
from moored.envs.base import SPLIT_SEEDS, split_of_content
from moored.envs.mix import open_env
from moored.envs.webshop.env import WebShop
from moored.envs.webshop.generate import DEPARTMENTS, generate_goals, generate_products
from moored.envs.webshop.oracle import earns_full_score
from moored.envs.webshop.shop import Catalogue
from moored.envs.webshop.visit import Visit, parse_action
from moored.errors import ConfigError, EnvError


def act(env: WebShop, *answers: str) -> StepResult:
    """The result of the last of these actions."""
    return [env.step(format_reply("", answer)) for answer in answers][-1]


def play_oracle(env: WebShop, seed: int) -> StepResult:
    env.reset(seed)
    while not (result := act(env, env.oracle())).is_over:
        pass
    return result


def opened(seed: int = 0, **options) -> WebShop:
    env = WebShop(**options)
    env.reset(seed)
    return env


def at_goal_product(seed: int = 0, **options) -> WebShop:
    """An episode on the page of the product that its goal was written for."""
    env = opened(seed, **options)
    act(env, f"search[{env.goal.title}]", f"click[{env.goal.asin}]")
    return env


def test_the_generated_shop_has_over_a_thousand_products_in_over_ten_departments() -> None:
    catalogue = WebShop().catalogue
    assert len(catalogue.products) == len({x.asin for x in catalogue.products}) == 1200
    assert len({x.title for x in catalogue.products}) == 1200
    assert len({x.product_category.rpartition(" › ")[0] for x in catalogue.products}) == 13
    assert len(catalogue.goals) == 4800
    assert len(DEPARTMENTS) == 13 and sum(len(x.kinds) for x in DEPARTMENTS) == 33


def test_every_generated_goal_is_met_by_its_own_product() -> None:
    catalogue = WebShop().catalogue
    assert all(earns_full_score(catalogue[goal.asin], goal) for goal in catalogue.goals)


def test_the_oracle_earns_the_full_score_on_hundreds_of_goals_of_every_split() -> None:
    env = WebShop()
    for seeds in SPLIT_SEEDS.values():
        for seed in seeds[:200]:
            result = play_oracle(env, seed)
            assert (result.success, result.reward, result.metrics["score"]) == (True, 1.0, 1.0)


def test_the_oracle_finds_back_from_any_page() -> None:
    for detour in (
        ["search[dog beds]", "click[Next >]"],
        ["search[zzzz]"],
        ["search[dog beds]", "click[Next >]", "click[Back to Search]"],
    ):
        env = opened(max_turns=20)
        act(env, *detour)
        while not (result := act(env, env.oracle())).is_over:
            pass
        assert result.success
    env = at_goal_product(max_turns=20)
    act(env, "click[Reviews]")
    assert env.oracle() == "click[< Prev]"
    env = opened(max_turns=20)
    act(env, "search[dog beds]")
    act(env, f"click[{env.visit.hits[0]}]")
    assert not earns_full_score(env.walk.product(env.visit), env.goal)
    assert env.oracle() == "click[Back to Search]"


def test_the_oracle_searches_by_what_the_instruction_says_where_turns_allow_to_leaf_on() -> None:
    env = WebShop(results_per_page=1, max_turns=10)
    num_next, num_titles = 0, 0
    for seed in SPLIT_SEEDS["train"][:60]:
        env.reset(seed)
        while True:
            action = env.oracle()
            num_titles += env.goal.title in action
            num_next += action == "click[Next >]"
            if (result := act(env, action)).is_over:
                break
        assert result.success
    assert num_next >= 10 and num_titles == 0


def test_with_no_turn_to_spare_the_oracle_searches_by_the_title() -> None:
    env = WebShop(results_per_page=1, max_turns=5)
    queries = [(env.reset(seed), env.oracle(), env.goal)[1:] for seed in SPLIT_SEEDS["train"][:60]]
    titles = [goal for query, goal in queries if query == f"search[{goal.title}]"]
    assert 5 <= len(titles) <= 30
    assert all(play_oracle(env, seed).success for seed in SPLIT_SEEDS["train"][:60])


def test_an_instruction_that_two_products_share_is_in_one_split() -> None:
    catalogue = opened(num_products=5000).catalogue
    splits: dict[str, set[str]] = {}
    for goal in catalogue.goals:
        split = split_of_content(catalogue.split_keys[goal.asin])
        splits.setdefault(goal.instruction, set()).add(split)
    assert len(splits) < len(catalogue.goals)  # some are shared
    assert all(len(found) == 1 for found in splits.values())
    alone = Catalogue([], catalogue.goals[:4]).split_keys
    assert alone == {catalogue.goals[0].asin: catalogue.goals[0].asin}


def test_products_that_share_instructions_with_a_third_are_in_its_split() -> None:
    goals = opened().catalogue.goals
    wanted = [("a", "x"), ("b", "y"), ("c", "x"), ("c", "y"), ("d", "z")]
    made = [replace(goals[0], asin=asin, instruction=text) for asin, text in wanted]
    assert Catalogue([], made).split_keys["b"] == Catalogue([], made).split_keys["c"]
    assert Catalogue([], made).split_keys["a"] == Catalogue([], made).split_keys["c"]
    assert Catalogue([], made).split_keys["d"] == "d"


def test_a_search_shows_ten_products_a_page_and_fifty_in_all() -> None:
    env = opened()
    first = act(env, "search[shoes boots]")
    assert "Results for 'shoes boots', 1 to 10 of 50, page 1 of 5:" in str(first.observation)
    numbers = env.walk.shown(env.visit)
    assert len(numbers) == 10 and all(
        f"[{number}] " in str(first.observation) for number in numbers
    )
    assert "[Back to Search] [Next >]" in str(first.observation)
    second = act(env, "click[Next >]")
    assert "11 to 20 of 50, page 2 of 5:" in str(second.observation)
    assert "[Back to Search] [< Prev] [Next >]" in str(second.observation)
    assert not set(numbers) & set(env.walk.shown(env.visit))
    act(env, "click[< Prev]")
    assert env.walk.shown(env.visit) == numbers
    act(env, *["click[Next >]"] * 4)
    assert env.walk.buttons(env.visit) == ["Back to Search", "< Prev"]


def test_a_product_page_leads_to_its_sub_pages_and_back() -> None:
    env = at_goal_product(max_turns=20)
    product = env.walk.product(env.visit)
    assert product.price_tag in str(
        act(env, f"search[{product.title}]", f"click[{product.asin}]").observation
    )
    for button, text in (("Description", product.description), ("Features", product.features[0])):
        assert text in str(act(env, f"click[{button}]").observation)
        assert env.walk.buttons(env.visit) == ["Back to Search", "< Prev"]
        act(env, "click[< Prev]")
        assert env.visit.place == "item"
    assert "Reviews of" in str(act(env, "click[reviews]").observation)
    act(env, "click[Back to Search]")
    assert env.visit == Visit()


def test_actions_are_read_in_any_case_and_with_brackets_inside() -> None:
    assert str(parse_action(" Search[ red  shoes ]")) == "search[red  shoes]"
    assert str(parse_action("CLICK[a [b] c]")) == "click[a [b] c]"
    assert str(parse_action("search[[2 pack] word search [x]]")) == (
        "search[[2 pack] word search [x]]"
    )
    for text in (
        "",
        "search",
        "search[]",
        "click[ ]",
        "buy now",
        "search[a] || click[b",
        "search[a] || click[b]",
        "search[a] || search [b]",
        "search[a]_click[b]",
        "search[a [b] click[c]",
        "search[a] || look[b]",
        "search[a]_look[b]",
        "search[a] || look [b]",
        "click[Buy Now]\nClick[a [b]]",
        "x" * 9999,
    ):
        assert parse_action(text) is None


def test_options_are_chosen_one_of_a_kind_and_forgotten_with_the_page() -> None:
    env = at_goal_product(max_turns=30)
    (name, values), *_ = env.walk.product(env.visit).options.items()
    act(env, f"click[{values[0]}]")
    result = act(env, f"click[{values[1].upper()}]")
    assert env.visit.chosen == {name: values[1]}
    assert f"(chosen: {values[1]})" in str(result.observation)
    act(env, "click[Features]", "click[< Prev]")
    assert env.visit.chosen == {name: values[1]}
    act(env, "click[< Prev]", f"click[{env.goal.asin}]")
    assert env.visit.chosen == {}


def test_a_button_that_is_not_there_does_nothing_and_costs_the_turn() -> None:
    env = opened()
    for answer in ("click[Buy Now]", "click[B000000000]", "click[blue]"):
        result = act(env, answer)
        assert (result.reward, result.is_valid, result.is_over) == (0.0, True, False)
        assert result.metrics["num_effective_actions"] == 0.0
        assert str(result.observation).startswith("This page has no such button. Reward: 0.")
    assert env.visit == Visit()
    assert "Turn 4 of 10." in str(result.observation)


def test_a_malformed_reply_costs_a_tenth_and_moves_nothing() -> None:
    env = opened()
    act(env, "search[shoes]")
    before = env.visit
    for reply in ("search[boots]", format_reply("", "boots"), format_reply("", "search[]")):
        result = env.step(reply)
        assert (result.reward, result.penalty, result.is_valid) == (-0.1, -0.1, False)
    assert env.visit == before


def test_a_partial_purchase_earns_nothing_unless_the_reward_is_dense() -> None:
    seed = next(seed for seed in range(50) if len(opened(seed).goal.options) == 2)
    goal = opened(seed).goal
    share = (len(goal.attributes) + 1) / (len(goal.attributes) + 3)
    for dense, reward in ((False, 0.0), (True, share)):
        result = act(at_goal_product(seed, dense=dense), "click[Buy Now]")
        assert result.reward == pytest.approx(reward)
        assert result.metrics["score"] == pytest.approx(share)
        assert (result.terminated, result.success, result.is_valid) == (True, False, True)
        assert "options 0 of 2, price fine)." in str(result.observation)


def test_running_out_of_turns_truncates_the_episode() -> None:
    env = opened(max_turns=2)
    assert not act(env, "search[a b]").is_over
    result = act(env, "search[shoes]")
    assert (result.terminated, result.truncated, result.success) == (False, True, False)
    assert result.observation == "Reward: 0. No turns left."
    with pytest.raises(EnvError, match="call reset before step"):
        act(env, "search[shoes]")


def test_a_purchase_on_the_last_turn_is_terminated_not_truncated() -> None:
    env = at_goal_product(max_turns=3)
    result = act(env, "click[Buy Now]")
    assert (result.terminated, result.truncated) == (True, False)


def test_another_seed_is_another_shop_and_the_same_seed_the_same() -> None:
    first, again, other = (
        WebShop(num_products=60, catalogue_seed=seed).catalogue for seed in (1, 1, 2)
    )
    assert first.products == again.products and first.goals == again.goals
    assert {x.title for x in first.products}.isdisjoint(x.title for x in other.products)


def test_the_shop_of_a_run_is_opened_once_and_not_pickled() -> None:
    with open_env("webshop", num_products=60) as env:
        assert isinstance(env, WebShop)
        env.reset(0)
        assert len(env.catalogue.products) == 60
        assert env.resources()["shop"] == env.shop
        shop = env.shop
        del env.shop
        assert len(pickle.dumps(env)) < 4000
    assert not hasattr(shop, "catalogue")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_products": 49}, "num_products must be at least 50"),
        ({"max_turns": 0}, "max_turns"),
        ({"attributes": "a.json"}, "products"),
        ({"products": "a.json"}, "goals"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict, message: str) -> None:
    with pytest.raises((EnvError, ConfigError), match=message):
        WebShop(**options)


def test_products_and_goals_of_a_seed_are_those_of_every_release() -> None:
    products = generate_products(1000, seed=0)
    text = repr((products, generate_goals(products, seed=0))).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "42aad69f565ac0a5"
