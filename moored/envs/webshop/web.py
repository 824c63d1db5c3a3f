"""The shop as a web page for a person: the same episode, turns and score as the model has.

`make_app` gives a Starlette application around one `WebShop`. One game at a time: all windows show
the same page. Nothing is loaded from elsewhere, product pictures included.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from moored.envs.base import StepResult
from moored.envs.webshop.pages import sub_page_lines
from moored.envs.webshop.products import Product
from moored.envs.webshop.visit import BACK, NEXT, PREV, SUB_PAGES
from moored.reply import format_reply

if TYPE_CHECKING:
    from jinja2 import Template
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from moored.envs.webshop.env import WebShop

TEMPLATES = Path(__file__).parent / "templates"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
NUM_HUES = 8
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
}


@dataclass(slots=True)
class Game:
    """The episode that the page shows."""

    env: WebShop
    task_seed: int
    episode_seed: int
    num_turns: int = 0
    result: StepResult | None = None
    """Of the last action."""
    text: str = ""
    """What the model would read now."""

    def start(self, task_seed: int) -> None:
        messages = self.env.reset(task_seed, self.episode_seed)
        self.task_seed, self.num_turns, self.result = task_seed, 0, None
        self.text = messages[-1].text

    def act(self, action: str) -> None:
        """One turn; nothing after the end."""
        if self.is_over:
            return
        self.result = self.env.step(format_reply("", action))
        self.num_turns += 1
        self.text = str(self.result.observation)

    @property
    def is_over(self) -> bool:
        return self.result is not None and self.result.is_over


def make_app(env: WebShop, task_seed: int = 0, episode_seed: int = 0) -> Starlette:
    """A web application that plays `env`, starting with the given task."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Route

    game = Game(env, task_seed, episode_seed)
    game.start(task_seed)
    # Another site must not reach the shop under a name of its own (DNS rebinding).
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(LOCAL_HOSTS))
    routes = [
        Route("/", functools.partial(_show, game)),
        Route("/style.css", _style),
        *(
            Route(f"/{verb}", functools.partial(_act, game, verb), methods=["POST"])
            for verb in FORMS
        ),
    ]
    return Starlette(routes=routes, middleware=[hosts])


FORMS = {"search": "keywords", "click": "button", "new": ""}
"""Where a form is sent -> its field."""


async def _show(game: Game, request: Request) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(_template().render(page_data(game)), headers=HEADERS)


async def _style(request: Request) -> Response:
    from starlette.responses import Response

    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    return Response(style, media_type="text/css", headers=HEADERS)


async def _act(game: Game, verb: str, request: Request) -> Response:
    from starlette.responses import PlainTextResponse, RedirectResponse

    # Another site must not press the buttons of this one.
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return PlainTextResponse("this form was sent from another site", status_code=403)
    if verb == "new":
        game.start(game.task_seed + 1)
    else:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"))
        text = fields.get(FORMS[verb], [""])[0].strip()
        if text:
            game.act(f"{verb}[{text}]")
    return RedirectResponse("/", status_code=303)


def page_data(game: Game) -> dict[str, object]:
    """What the template shows."""
    env, visit = game.env, game.env.visit
    walk, goal = env.walk, env.goal
    has_product = bool(visit.asin)
    product = walk.product(visit) if has_product else None
    return {
        "place": "over" if game.is_over and visit.place != "bought" else visit.place,
        "task_seed": game.task_seed,
        "instruction": goal.instruction,
        "turn": min(game.num_turns + 1, env.max_turns),
        "max_turns": env.max_turns,
        "is_over": game.is_over,
        "visit": visit,
        "buttons": walk.buttons(visit),
        "names": {"back": BACK, "next": NEXT, "prev": PREV},
        "sub_pages": list(SUB_PAGES),
        "num_pages": walk.num_pages(visit),
        "num_products": len(walk.catalogue.products),
        "cards": [_card(walk.catalogue[asin]) for asin in walk.shown(visit)],
        "product": None if product is None else _card(product),
        "lines": sub_page_lines(product, visit.place) if product is not None else [],
        "notice": _notice(game),
        "result": game.result,
        "score": env.score() if visit.place == "bought" else None,
        "goal": goal,
        "text": game.text,
    }


def _card(product: Product) -> dict[str, object]:
    """A product, and its picture: the first letters of its kind on a colour of its own."""
    words = product.query.split() or product.title.split()
    hue = hashlib.sha256(product.asin.encode()).digest()[0] % NUM_HUES
    letters = "".join(word[0] for word in words[:2] if word[0].isalnum()).upper()
    return {"item": product, "letters": letters or "?", "hue": hue}


def _notice(game: Game) -> str:
    """What to tell about the last action, where the page itself does not show it."""
    result = game.result
    if result is None or result.is_over or result.metrics["num_effective_actions"]:
        return ""
    what = "That button is not on this page" if result.is_valid else "That was not an action"
    return f"{what}; the turn is used up."


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("shop.html")
