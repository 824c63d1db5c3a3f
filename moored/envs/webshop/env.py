"""WebShop: search a shop, look at products, choose options and buy what an instruction asks for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moored.envs.base import FORMAT_REMINDER, StepResult, draw_task
from moored.envs.webshop.oracle import explain, guess, next_action
from moored.envs.webshop.pages import render_page
from moored.envs.webshop.products import Goal
from moored.envs.webshop.score import PurchaseScore, purchase_score
from moored.envs.webshop.shop import Catalogue, Shop
from moored.envs.webshop.visit import Visit, Walk, parse_action
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

if TYPE_CHECKING:
    from starlette.applications import Starlette

MIN_PRODUCTS = 50


class WebShop:
    """Find, configure and buy a product that an instruction describes, in a shop of many pages.

    A turn is one action. `search[keywords]` works on every page and finds up to 50 products, ten on
    a page of results; `click[button]` presses what stands in square brackets: a product, an option,
    `Next >`, `< Prev`, `Back to Search`, the sub-pages `Description`, `Features` and `Reviews`, or
    `Buy Now`, which ends the episode. A button that is not on the page does nothing.

    Without files the shop is generated: 1,200 products of 33 kinds in 13 departments, and 4,800
    goals. WebShop's own files load as they are: `items_shuffle*.json` as `products`,
    `items_ins_v2*.json` as `attributes` and `items_human_ins*.json` as `human_goals`. All goals of
    one product belong to one split, and so do products that are asked for in the same words. A
    product with a range of prices costs the highest.
    `moored play webshop --web` shows the same shop to a person as a web page (needs
    `moored[serve]`).

    Reward: 1 when the purchase has the full score, else 0; with `dense` the score itself, the
    reward of the RAGEN-2 paper, which the preset `webshop` sets. Success is a full score in both.
    The score is WebShop's: the kind of product (1, 0.5, 0.1 or 0) times the share of attributes,
    options and the price limit that are met; it is recorded as the metric `score`. The kind
    compares the nouns of two titles, found by spaCy's model en_core_web_sm where it is installed;
    without it, all words of a title count. A malformed reply earns `format_penalty` and uses up the
    turn. Running out of turns truncates the episode.

    Options:
    - `products=None`: file of products, JSON or JSON lines; None: the generated shop.
    - `attributes=None`: file of attributes and made instructions.
    - `human_goals=None`: file of instructions that people wrote, used instead of made ones.
    - `num_products=None`: how many to generate, at least 50 (None: 1,200), or to read (None: all).
    - `catalogue_seed=0`: another number generates another shop.
    - `dense=False`: pay the score, not only a full one; True in the preset `webshop`.
    - `results_per_page=10`: products on a page of results.
    - `max_turns=10`: actions an episode has.
    - `format_penalty=-0.1`: reward of a malformed reply.
    """

    name: ClassVar[str] = "webshop"
    is_stochastic: bool = False
    shop: Shop

    def __init__(
        self,
        *,
        products: str | Path | None = None,
        attributes: str | Path | None = None,
        human_goals: str | Path | None = None,
        num_products: int | None = None,
        catalogue_seed: int = 0,
        dense: bool = False,
        results_per_page: int = 10,
        max_turns: int = 10,
        format_penalty: float = -0.1,
    ) -> None:
        least = {
            "results_per_page": (results_per_page, 1),
            "max_turns": (max_turns, 1),
            "num_products": (num_products, MIN_PRODUCTS if products is None else 1),
        }
        for option, (value, fewest) in least.items():
            if value is not None and value < fewest:
                raise EnvError(f"webshop: {option} must be at least {fewest}, got {value}")
        if products is None and (attributes is not None or human_goals is not None):
            raise EnvError(
                "webshop: attributes and human_goals describe the products of a file; give that "
                "file as products"
            )
        if products is not None and attributes is None and human_goals is None:
            raise EnvError(
                f"webshop: products={str(products)!r} has no goals; give attributes "
                f"(items_ins_v2*.json) or human_goals (items_human_ins*.json) too"
            )
        self.products = products
        self.attributes = attributes
        self.human_goals = human_goals
        self.num_products = num_products
        self.catalogue_seed = catalogue_seed
        self.dense = dense
        self.results_per_page = results_per_page
        self.max_turns = max_turns
        self.format_penalty = format_penalty
        self._goal: Goal | None = None
        self._visit = Visit()
        self._turn = 0
        self._over = True

    def resources(self) -> dict[str, Shop]:
        files = self.products, self.attributes, self.human_goals
        return {"shop": Shop(*files, self.num_products, self.catalogue_seed)}

    @property
    def catalogue(self) -> Catalogue:
        """The products of the shop; outside a run, it is opened at the first use."""
        if not hasattr(self, "shop"):
            shop = self.resources()["shop"]
            shop.open()
            self.shop = shop
        return self.shop.catalogue

    @property
    def goal(self) -> Goal:
        """What to buy in this episode."""
        if self._goal is None:
            raise EnvError("webshop: there is no task yet; call reset first")
        return self._goal

    @property
    def walk(self) -> Walk:
        return Walk(self.catalogue, self.results_per_page)

    @property
    def visit(self) -> Visit:
        """The page that the visitor is on."""
        return self._visit

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        catalogue = self.catalogue
        self._goal, _ = draw_task(
            task_seed,
            lambda rng: rng.choice(catalogue.goals),
            lambda goal: catalogue.split_keys[goal.asin],
        )
        self._visit = Visit()
        self._turn = 0
        self._over = False
        return [Message("system", self._rules()), Message("user", self._turn_text(""))]

    def step(self, reply: str) -> StepResult:
        if self._over:
            raise EnvError("webshop: the episode is over; call reset before step")
        answer = parse_reply(reply).answer
        action = None if answer is None else parse_action(answer)
        self._turn += 1
        if action is None:
            lead = f"Malformed reply. Reward: {self.format_penalty:g}."
            return self._finish(lead, self.format_penalty, is_valid=False)
        visit = self.walk.follow(self._visit, action)
        if visit is None:
            return self._finish("This page has no such button. Reward: 0.", 0.0)
        self._visit = visit
        if visit.place != "bought":
            return self._finish("Reward: 0.", 0.0, num_effective=1.0)
        return self._finish_purchase()

    def oracle(self) -> str:
        if self._over:
            raise EnvError("webshop: the episode is over or was not begun; call reset first")
        num_turns = self.max_turns - self._turn
        return str(next_action(self.walk, self._visit, self.goal, num_turns))

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """What is wanted, and what of it the page shows."""
        action = parse_action(answer)
        assert action is not None, answer
        return explain(self.walk, self._visit, self.goal, action, rng)

    def guess(self, rng: random.Random) -> str:
        """Anything that the page offers."""
        return str(guess(self.walk, self._visit, self.goal, rng))

    def close(self) -> None:
        self._over = True

    def score(self) -> PurchaseScore:
        """The score of buying what is looked at, as it is."""
        product = self.walk.product(self._visit)
        return purchase_score(product, self.goal, self._visit.chosen, product.price)

    def web_app(self, task_seed: int = 0, episode_seed: int = 0) -> Starlette:
        """The shop as a web page for a person, as `moored play webshop --web` shows it."""
        from moored.envs.webshop.web import make_app

        return make_app(self, task_seed, episode_seed)

    def _finish_purchase(self) -> StepResult:
        score = self.score()
        reward = score.total if self.dense else float(score.is_full)
        self._over = True
        verdict = "Solved." if score.is_full else "Not what was asked for."
        page = render_page(self.walk, self._visit)
        return StepResult(
            observation=f"Reward: {reward:g}. {verdict}\n{page}\n{self._explain(score)}",
            reward=reward,
            terminated=True,
            success=score.is_full,
            metrics={"num_actions": 1.0, "num_effective_actions": 1.0, "score": score.total},
        )

    def _finish(
        self, lead: str, reward: float, *, is_valid: bool = True, num_effective: float = 0.0
    ) -> StepResult:
        self._over = self._turn >= self.max_turns
        return StepResult(
            observation=f"{lead} No turns left." if self._over else self._turn_text(f"{lead}\n"),
            reward=reward,
            penalty=0.0 if is_valid else reward,
            terminated=False,
            truncated=self._over,
            is_valid=is_valid,
            metrics={
                "num_actions": float(is_valid),
                "num_effective_actions": num_effective,
                "score": 0.0,
            },
        )

    def _explain(self, score: PurchaseScore) -> str:
        goal = self.goal
        return (
            f"Score: {score.total:.3g} (kind {score.r_type:g}, attributes "
            f"{score.attribute_matches} of {len(goal.attributes)}, options {score.option_matches} "
            f"of {len(goal.options)}, price {'fine' if score.price_ok else 'too high'})."
        )

    def _rules(self) -> str:
        other = "the share of the instruction that it meets" if self.dense else "nothing"
        return (
            "You are in a web shop. Find a product that fits the instruction, choose its options "
            "and buy it.\n"
            "Actions: search[keywords] searches the shop, on every page. click[button] presses "
            "what the page shows in square brackets: a product's number opens its page, an option "
            "is chosen, click[Buy Now] buys the product with the chosen options and ends the "
            "episode. A button that is not on the page does nothing.\n"
            f"Give one action a turn. You have at most {self.max_turns} turns. A purchase that "
            f"fits the instruction fully earns 1, any other {other}. A malformed reply earns "
            f"{self.format_penalty:g} and uses up the turn.\n"
            f"{FORMAT_REMINDER}, where the answer is the action alone."
        )

    def _turn_text(self, lead: str) -> str:
        return (
            f"{lead}Turn {self._turn + 1} of {self.max_turns}.\n"
            f"Instruction: {self.goal.instruction}\n"
            f"{render_page(self.walk, self._visit)}\n{FORMAT_REMINDER}."
        )
