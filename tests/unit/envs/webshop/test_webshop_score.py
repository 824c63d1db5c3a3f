"""The score of a purchase, worked out by hand from WebShop's definition."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from moored.envs.webshop import Goal, Product, purchase_score
from moored.envs.webshop.matching import content_words

SHOES = Product(
    asin="B000000001",
    title="Acme Trail Running Shoes",
    query="running shoes",
    product_category="Clothing › Men › Shoes › Running",
    price=59.99,
    price_tag="$59.99",
    description="Arch support for long walks.",
    features=("Breathable mesh upper", "Pull tab at the heel"),
    attributes=("rubber sole", "water resistant"),
)
GOAL = Goal(
    asin="B000000002",
    instruction="",
    title="Zeno Road Running Shoes",
    query="running shoes",
    product_category="Clothing › Men › Shoes › Running",
    attributes=("rubber sole", "arch support"),
    options=("blue", "10 wide"),
    price_limit=60.0,
)
"""The words of its title are zeno, road, running, shoes: two of four are in the product's title.
The score is r_type times the matches out of 2 + 2 + 1 = 5."""
FITTING = {"color": "light blue", "size": "10 wide"}
OTHER = {"query": "boots", "product_category": "Outdoor › Hiking"}
"""Neither the query nor a category level is shared."""


@dataclass(frozen=True)
class Case:
    """One purchase: what differs from the one above, and the parts of its score."""

    claim: str
    r_type: float
    attributes: int
    options: int
    price_ok: bool
    total: float
    product: dict = field(default_factory=dict)
    goal: dict = field(default_factory=dict)
    chosen: dict | list = field(default_factory=lambda: FITTING)
    price: float = 59.99


def title(text: str, wanted: str = GOAL.title) -> dict:
    """A product of another kind called `text`, for a goal called `wanted`."""
    return {"product": {"title": text, **OTHER}, "goal": {"title": wanted}}


def only(*attributes: str) -> dict:
    """A goal with these attributes, no options: out of len(attributes) + 1."""
    return {"attributes": attributes, "options": ()}


def one(option: str) -> dict:
    """A goal with one option, no attributes: out of 2."""
    return {"attributes": (), "options": (option,)}


TWENTY = "stainless steel dual"  # 20 characters
CASES = [
    # Everything fits, or one part does not.
    Case("everything fits", 1, 2, 2, True, 1.0),
    Case("nothing chosen", 1, 2, 0, True, 3 / 5, chosen={}),
    Case("one option chosen", 1, 2, 1, True, 4 / 5, chosen={"color": "blue"}),
    Case("values without names", 1, 2, 2, True, 1.0, chosen=["10 wide", "blue"]),
    Case("another colour", 1, 2, 1, True, 4 / 5, chosen={"color": "pink", "size": "10 wide"}),
    Case("too dear", 1, 2, 2, False, 4 / 5, price=60.01),
    Case("exactly the limit", 1, 2, 2, True, 1.0, price=60.0),
    Case("no limit", 1, 2, 2, True, 1.0, goal={"price_limit": None}, price=1e9),
    Case("too dear and no option", 1, 2, 0, False, 2 / 5, chosen={}, price=99.0),
    Case("only the price", 1, 0, 0, True, 1 / 3, goal=only("vegan", "organic")),
    Case("nothing at all", 1, 0, 0, False, 0.0, goal=only("vegan", "organic"), price=99.0),
    Case("no attribute, no option, fine price", 1, 0, 0, True, 1.0, goal=only()),
    Case("no attribute, no option, too dear", 1, 0, 0, False, 0.0, goal=only(), price=61.0),
    Case("needless options cost nothing", 1, 1, 0, True, 1.0, goal=only("rubber sole")),
    # Attributes: the product's list, fuzzy.
    Case("another form of the word: 1 - 1/23", 1, 1, 0, True, 1.0, goal=only("rubber soles")),
    Case("a longer word: 1 - 3/25 = 88 %", 1, 1, 0, True, 1.0, goal=only("rubber outsole")),
    Case("another word: 1 - 9/23 = 61 %", 1, 0, 0, True, 1 / 2, goal=only("leather sole")),
    Case("another word, alike in sense", 1, 0, 0, True, 1 / 2, goal=only("waterproof")),
    Case("the same words in another order", 1, 1, 0, True, 1.0, goal=only("sole rubber")),
    Case("capitals in the list", 1, 1, 0, True, 1.0, goal=only("Rubber Sole")),
    Case("a hyphen is a space", 1, 1, 0, True, 1.0, goal=only("water-resistant")),
    Case("a part of an attribute", 1, 1, 0, True, 1.0, goal=only("resistant")),
    Case("more words than the attribute", 1, 1, 0, True, 1.0, goal=only("soft rubber sole")),
    Case("an empty list", 1, 0, 0, True, 1 / 2, {"attributes": ()}, only("rubber sole")),
    Case(
        "a ratio of 85 is not above 85: 1 - 6/40",
        *(1, 0, 0, True, 1 / 2),
        product={"attributes": ("wireless charging stand",)},
        goal=only("wireless charging cubby"),
    ),
    Case(
        "a ratio of 85.1 is rounded to 85: 1 - 7/47",
        *(1, 0, 0, True, 1 / 2),
        product={"attributes": (f"{TWENTY} handle",)},
        goal=only(f"{TWENTY} robust"),
    ),
    Case(
        "a ratio of 85.7 is rounded to 86: 1 - 4/28",
        *(1, 1, 0, True, 1.0),
        product={"attributes": ("machine wash mug",)},
        goal=only("machine wash tip"),
    ),
    # Attributes: title, features and description contain them.
    Case("in the title", 1, 1, 0, True, 1.0, goal=only("trail")),
    Case("in a feature", 1, 1, 0, True, 1.0, goal=only("breathable mesh")),
    Case("across two features", 1, 1, 0, True, 1.0, goal=only("upper pull")),
    Case("in the description", 1, 1, 0, True, 1.0, goal=only("long walks")),
    Case("part of a word", 1, 1, 0, True, 1.0, goal=only("breath")),
    Case("words apart in the text", 1, 0, 0, True, 1 / 2, goal=only("mesh heel")),
    Case("texts are in lower case, the goal is not", 1, 0, 0, True, 1 / 2, goal=only("Trail")),
    Case("one of three", 1, 1, 0, True, 2 / 4, goal=only("trail", "vegan", "organic")),
    Case("the same attribute twice", 1, 2, 0, True, 1.0, goal=only("trail", "trail")),
    # Options: colours.
    Case("blue is found before navy", 1, 0, 1, True, 1.0, goal=one("blue"), chosen=["navy blue"]),
    Case("dark stands for both", 1, 0, 1, True, 1.0, goal=one("dark grey"), chosen=["dark green"]),
    Case("gray is not grey: 75 %", 1, 0, 0, True, 1 / 2, goal=one("grey"), chosen=["gray"]),
    Case("ash in washed", 1, 0, 1, True, 1.0, goal=one("ash brown"), chosen=["washed denim"]),
    Case("tan in standard", 1, 0, 1, True, 1.0, goal=one("tan"), chosen=["standard"]),
    Case("a colour in capitals is a word", 1, 0, 1, True, 1.0, goal=one("blue"), chosen=["BLUE"]),
    Case(
        "one choice serves two goals",
        *(1, 0, 2, True, 1.0),
        goal={"attributes": (), "options": ("blue", "royal blue")},
        chosen=["blue"],
    ),
    # Options: sizes and packs.
    Case("10 is in 10 wide", 1, 0, 1, True, 1.0, goal=one("10 wide"), chosen=["10"]),
    Case("8.5 is 8 and 5", 1, 0, 1, True, 1.0, goal=one("8"), chosen=["8.5"]),
    Case("9 is not 8", 1, 0, 0, True, 1 / 2, goal=one("8"), chosen=["9"]),
    Case("small is in x-small", 1, 0, 1, True, 1.0, goal=one("small"), chosen=["x-small"]),
    Case("1 - 1/15 = 93 %", 1, 0, 1, True, 1.0, goal=one("xx-large"), chosen=["x-large"]),
    Case("medium is not large", 1, 0, 0, True, 1 / 2, goal=one("large"), chosen=["medium"]),
    Case("1 - 2/18 = 89 %", 1, 0, 1, True, 1.0, goal=one("pack of 3"), chosen=["pack of 2"]),
    Case("signs alone match nothing", 1, 0, 0, True, 1 / 2, goal=one("+"), chosen=["+"]),
    Case("an empty choice", 1, 0, 0, True, 1 / 2, goal=one("8"), chosen=[""]),
    # The kind of product.
    Case("one noun of four", 1, 2, 2, True, 1.0, **title("Alpine Shoes")),
    Case("one noun of five", 0.5, 2, 2, True, 0.5, **title("Shoes", "Zeno Road City Park Shoes")),
    Case(
        "one noun of ten",
        0.5,
        2,
        2,
        True,
        0.5,
        **title("Shoes", "a1 b1 c1 d1 e1 f1 g1 h1 i1 shoes"),
    ),
    Case(
        "one noun of eleven",
        *(0.1, 2, 2, True, 0.1),
        **title("Shoes", "a1 b1 c1 d1 e1 f1 g1 h1 i1 j1 shoes"),
    ),
    Case("no noun", 0, 2, 2, True, 0.0, **title("Alpine Boots")),
    Case("no noun, though the query is the same", 0, 2, 2, True, 0.0, {"title": "Alpine Boots"}),
    Case(
        "one noun of eleven and the same query",
        *(0.1, 2, 2, True, 0.1),
        product={"title": "Shoes"},
        goal={"title": "a1 b1 c1 d1 e1 f1 g1 h1 i1 j1 shoes"},
    ),
    Case(
        "one noun of five and the same query",
        *(1, 2, 2, True, 1.0),
        product={"title": "Shoes", "product_category": ""},
        goal={"title": "Zeno Road City Park Shoes"},
    ),
    Case(
        "one noun of five and two levels, in another order",
        *(1, 2, 2, True, 1.0),
        product={"title": "Shoes", "query": "", "product_category": "Shoes › Kids ›Men"},
        goal={"title": "Zeno Road City Park Shoes"},
    ),
    Case(
        "one noun of five and one level",
        *(0.5, 2, 2, True, 0.5),
        product={"title": "Shoes", "query": "", "product_category": "Shoes › Kids"},
        goal={"title": "Zeno Road City Park Shoes"},
    ),
    Case("a noun five times", 0.5, 2, 2, True, 0.5, **title("Shoes", "shoes " * 5)),
    Case("a goal title without nouns", 0.5, 2, 2, True, 0.5, **title("Shoes", "for the 12")),
    Case(
        "a goal title without nouns and the same query",
        *(1, 2, 2, True, 1.0),
        goal={"title": "for the 12"},
    ),
    Case(
        "half the kind, three of five",
        0.5,
        2,
        0,
        True,
        0.3,
        chosen=[],
        **title("Shoes", "a shoes b1 c1 d1 e1"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.claim)
def test_the_score_of_a_purchase_is_the_one_worked_out_by_hand(case: Case) -> None:
    product, goal = replace(SHOES, **case.product), replace(GOAL, **case.goal)
    score = purchase_score(product, goal, case.chosen, case.price, nouns=content_words)
    found = score.r_type, score.attribute_matches, score.option_matches, score.price_ok
    assert found == (case.r_type, case.attributes, case.options, case.price_ok)
    assert score.total == pytest.approx(case.total, abs=1e-12)
    assert score.is_full == (case.total == 1.0)
