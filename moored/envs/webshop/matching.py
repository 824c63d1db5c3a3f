"""How WebShop compares words: fuzzy token sets, colours, and the nouns of a title."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Callable

from rapidfuzz import fuzz

logger = logging.getLogger(__name__)

NounFinder = Callable[[str], list[str]]
SPACY_MODEL = "en_core_web_sm"
NOUN_TAGS = ("NOUN", "PROPN")
WORD = re.compile(r"[^\W_]+")

COLOURS = (
    *("alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black"),
    *("blue", "blush", "bordeaux", "bronze", "brown", "burgundy", "camel", "camo", "caramel"),
    *("champagne", "charcoal", "cheetah", "chestnut", "chocolate", "christmas", "coffee"),
    *("cognac", "copper", "coral", "cranberry", "cream", "crystal", "dark", "denim", "eggplant"),
    *("elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite", "grass", "gray"),
    *("green", "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon"),
    *("leopard", "light", "lilac", "lime", "magenta", "maroon", "mauve", "merlot", "midnight"),
    *("mint", "mocha", "multicolor", "mushroom", "mustard", "natural", "navy", "nude", "olive"),
    *("orange", "peach", "pewter", "pink", "plum", "purple", "rainbow", "red", "rose", "royal"),
    *("rust", "sand", "sapphire", "seashell", "silver", "skull", "slate", "steel", "stone"),
    *("stonewash", "sunflower", "tan", "taupe", "teal", "tiger", "turquoise", "violet", "walnut"),
    *("wheat", "white", "wine", "yellow"),
)
"""WebShop's colour words; the first one that an option contains stands for it."""

STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "in"),
        *("into", "is", "it", "its", "no", "not", "of", "on", "or", "our", "that"),
        *("the", "their", "this", "to", "up", "we", "with", "without", "you", "your"),
    )
)


def normalize_colour(text: str) -> str:
    """`light blue` -> `blue`: the first of COLOURS inside the text, else the text itself."""
    return next((colour for colour in COLOURS if colour in text), text)


@functools.lru_cache(maxsize=65536)
def is_close(a: str, b: str) -> bool:
    """A token-set ratio above 85, rounded as in the package that WebShop uses."""
    return round(fuzz.token_set_ratio(_clean(a), _clean(b))) > 85


def content_words(title: str) -> list[str]:
    """Words with a letter that are not stop words: what stands for nouns without spaCy."""
    words = WORD.findall(title.lower())
    return [word for word in words if word not in STOP_WORDS and not word.isnumeric()]


def find_nouns(title: str) -> list[str]:
    """The nouns of a title by spaCy's small English model where it is installed, else its words."""
    return _noun_finder()(title)


def has_spacy_model() -> bool:
    """True where titles are read by spaCy, as in the original, and not as content words."""
    return all(importlib.util.find_spec(name) is not None for name in ("spacy", SPACY_MODEL))


@functools.cache
def _noun_finder() -> NounFinder:
    if not has_spacy_model():
        logger.info(
            "spaCy's model %s is not installed: WebShop's type score compares all content words of "
            "two titles instead of their nouns",
            SPACY_MODEL,
        )
        return functools.lru_cache(maxsize=65536)(content_words)
    import spacy  # pyright: ignore[reportMissingImports]

    parse = spacy.load(SPACY_MODEL)

    @functools.lru_cache(maxsize=65536)
    def nouns(title: str) -> list[str]:
        return [token.text.lower() for token in parse(title) if token.pos_ in NOUN_TAGS]

    return nouns


def _clean(text: str) -> str:
    return "".join(letter if letter.isalnum() else " " for letter in text.lower())
