"""WebShop's own files load as they are; the real products browse, search and sell."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from moored.envs import format_reply
from moored.envs.base import SPLIT_SEEDS
from moored.envs.webshop import Review, purchase_score
from moored.envs.webshop.env import WebShop
from moored.envs.webshop.official import load_goals, load_products
from moored.envs.webshop.oracle import fitting_options, next_action
from moored.envs.webshop.products import product_from_row
from moored.envs.webshop.visit import Action, Visit, Walk
from moored.errors import EnvError

DATA = Path(__file__).parents[5] / "shared" / "data"
PRODUCTS = DATA / "webshop_documents_100.jsonl"
ATTRIBUTES = DATA / "webshop_items_ins_v2_1000.json"
needs_data = pytest.mark.skipif(not PRODUCTS.is_file(), reason="the real products are not here")

ROW = {
    "asin": "B01",
    "name": "Acme Mug",
    "query": "Mugs ",
    "category": "garden",
    "product_category": "Home › Kitchen › Mugs",
    "full_description": "A mug.",
    "small_description": ["Holds 12 oz", "Blue glaze"],
    "pricing": "$9.99$1,012.50",
    "average_rating": 4.5,
    "images": ["https://example.org/a.jpg"],
    "customization_options": {
        "Color": [{"value": " Navy/White ", "image": None}, {"value": "Red"}],
        "Size": None,
    },
}
INS = {
    "B01": {
        "attributes": ["dishwasher safe"],
        "instruction": "Find me dishwasher safe mugs",
        "instruction_attributes": ["dishwasher safe"],
    },
    "B02": {"attributes": []},
}
HUMAN = {
    "B01": [
        {
            "instruction": "i want a mug.",
            "instruction_attributes": ["dishwasher safe"],
            "instruction_options": ["red"],
        },
        {"instruction": "a mug", "instruction_attributes": [], "instruction_options": []},
    ]
}


def write(folder: Path, name: str, content: object) -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_a_row_of_items_shuffle_is_read_as_webshop_reads_it(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "name": "twin"}, {**ROW, "asin": "nan"}, {**ROW, "asin": "B" * 11}]
    files = write(tmp_path, "items_shuffle.json", rows), write(tmp_path, "items_ins_v2.json", INS)
    (product,) = load_products(*files)
    assert (product.asin, product.title, product.query) == ("B01", "Acme Mug", "mugs")
    assert (product.price, product.price_tag) == (1012.5, "$9.99 to $1,012.50")
    assert product.options == {"color": ("navy | white", "red")}
    assert product.features == ("Holds 12 oz", "Blue glaze")
    assert (product.attributes, product.rating) == (("dishwasher safe",), "4.5")


@pytest.mark.parametrize(
    ("pricing", "price", "tag"),
    [
        ("$12.00", 12.0, "$12.00"),
        ("", 100.0, "$100.00"),
        (None, 100.0, "$100.00"),
        ([5.0], 5.0, "$5.00"),
        ("Currently unavailable", 100.0, "$100.00"),
        ("$3.50 - $2.50", 3.5, "$2.50 to $3.50"),
    ],
)
def test_prices_are_read_from_text_and_numbers(pricing: object, price: float, tag: str) -> None:
    product = product_from_row({**ROW, "pricing": pricing})
    assert (product.price, product.price_tag) == (price, tag)


def test_reviews_and_missing_parts_are_read() -> None:
    reviews = [{"title": "Nice", "stars": "5", "review": "I like it"}]
    product = product_from_row({"name": "x", "Reviews": reviews, "small_description": "one"})
    assert product.reviews == (Review("Nice", "I like it", "5"),)
    assert (product.features, product.options, product.rating) == (("one",), {}, "")


def test_made_goals_name_every_combination_of_options(tmp_path: Path) -> None:
    files = write(tmp_path, "p.json", [ROW]), write(tmp_path, "a.json", INS)
    goals = load_goals(load_products(*files), *files, None)
    assert [goal.options for goal in goals] == [("navy | white",), ("red",)]
    assert goals[1].instruction == "Find me dishwasher safe mugs with color: red"
    assert goals[1].price_limit is None  # there is no round price above 1,012.50 dollars


def test_a_goal_names_one_of_the_round_prices_above(tmp_path: Path) -> None:
    files = write(tmp_path, "p.json", [{**ROW, "pricing": "$11"}]), write(tmp_path, "a.json", INS)
    goals = load_goals(load_products(*files), *files, None)
    for goal in goals:
        assert goal.price_limit in (30.0, 40.0, 50.0)  # the higher of two of 20, 30, 40 and 50
        assert goal.instruction.endswith(f", and price lower than {goal.price_limit:.2f} dollars")
    assert goals == load_goals(load_products(*files), *files, None)


def test_goals_that_people_wrote_replace_the_made_ones(tmp_path: Path) -> None:
    files = write(tmp_path, "p.json", [ROW]), write(tmp_path, "a.json", INS)
    (goal,) = load_goals(load_products(*files), *files, write(tmp_path, "h.json", HUMAN))
    assert (goal.instruction, goal.options) == ("i want a mug", ("red",))


def test_a_product_with_many_options_has_twenty_goals(tmp_path: Path) -> None:
    values = [{"value": f"v{number}"} for number in range(30)]
    row = {**ROW, "customization_options": dict.fromkeys(("A", "B", "C"), values)}
    files = write(tmp_path, "p.json", [row]), write(tmp_path, "a.json", INS)
    goals = load_goals(load_products(*files), *files, None)
    assert len({goal.options for goal in goals}) == 20


def test_a_small_file_warns_of_the_splits_it_cannot_fill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = WebShop(
        products=write(tmp_path, "p.json", [ROW]), attributes=write(tmp_path, "a.json", INS)
    )
    with caplog.at_level(logging.WARNING):
        assert len(env.catalogue.products) == 1
    assert "none of its 2 goals belongs to the" in caplog.text


@pytest.mark.parametrize(
    ("products", "attributes", "message"),
    [
        ("[{]", INS, "JSON"),
        ("", INS, "products|rows"),
        ([1], INS, "row 1"),
        ([{"asin": "B01"}], INS, "'name'"),
        ([ROW], [1], "got a list"),
        ([ROW], "{", "is not complete JSON"),
        ([{**ROW, "asin": "B02"}], INS, "has a goal"),
    ],
)
def test_files_that_cannot_be_used_say_why(
    tmp_path: Path, products: object, attributes: object, message: str
) -> None:
    env = WebShop(
        products=write(tmp_path, "p.json", products),
        attributes=write(tmp_path, "a.json", attributes),
    )
    with pytest.raises(EnvError, match=message):
        env.reset(0)


@needs_data
def test_the_100_real_products_browse_search_and_buy_without_error() -> None:
    env = WebShop(products=PRODUCTS, attributes=ATTRIBUTES, max_turns=100)
    walk = env.walk
    assert len(walk.catalogue.products) == 100
    env.reset(0)
    for product in walk.catalogue.products:
        env.reset(0)
        results = [env.step(format_reply("", f"search[{product.title}]"))]
        assert walk.shown(env.visit)[0] == product.asin
        values = [value for values in product.options.values() for value in values]
        pages = ["Description", "< Prev", "Features", "< Prev", "Reviews", "< Prev"]
        for button in (product.asin, *pages, *values, "Buy Now"):
            results.append(env.step(format_reply("", f"click[{button}]")))
            if results[-1].is_over or len(results) == env.max_turns:
                break
        assert all(len(str(result.observation)) < 5000 for result in results)
        assert all(result.metrics["num_effective_actions"] == 1.0 for result in results)
        assert results[-1].terminated
        assert 0.0 <= results[-1].metrics["score"] <= 1.0


@needs_data
def test_the_oracle_meets_every_made_goal_of_the_real_products() -> None:
    env = WebShop(products=PRODUCTS, attributes=ATTRIBUTES)
    walk = Walk(env.catalogue, 10)
    assert len(env.catalogue.goals) == 299
    for goal in env.catalogue.goals:
        visit = Visit()
        for turn in range(10):
            if visit.place != "bought":
                visit = walk.follow(visit, next_action(walk, visit, goal, 10 - turn)) or visit
        product = walk.product(visit)
        assert visit.place == "bought"
        assert purchase_score(product, goal, visit.chosen, product.price).is_full
        own = env.catalogue[goal.asin]
        assert purchase_score(own, goal, fitting_options(own, goal), own.price).total == 1.0


@needs_data
def test_real_goals_of_all_splits_can_be_drawn() -> None:
    env = WebShop(products=PRODUCTS, attributes=ATTRIBUTES)
    asins = [{(env.reset(seed), env.goal.asin)[1] for seed in x[:50]} for x in SPLIT_SEEDS.values()]
    assert all(asins) and not set.intersection(*asins)


@needs_data
def test_instructions_that_people_wrote_find_products_in_the_real_shop() -> None:
    walk = Walk(WebShop(products=PRODUCTS, attributes=ATTRIBUTES).catalogue, 10)
    texts = json.loads((DATA / "webshop_human_goals.json").read_text(encoding="utf-8"))[:300]
    visits = [walk.follow(Visit(), Action("search", text)) for text in texts]
    found = [visit for visit in visits if visit is not None and visit.hits]
    assert len(found) == 300
