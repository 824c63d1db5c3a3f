"""How WebShop compares words: fuzzy token sets, colours, and the nouns of a title.

`token_set_ratio` equals rapidfuzz's (with its `default_process`), so that the shop needs no
package; a test compares them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Callable

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


def is_close(a: str, b: str) -> bool:
    """A token-set ratio above 85, rounded as in the package that WebShop uses."""
    return round(token_set_ratio(a, b)) > 85


@functools.lru_cache(maxsize=65536)
def token_set_ratio(a: str, b: str) -> float:
    """How alike two texts are as sets of words, from 0 to 100.

    100 when the words of one are all in the other. Else the words in common are put before the rest
    of each text, and the likeness of each two of the three texts is 1 - distance / length, where
    the distance counts characters to remove and insert.
    """
    words_a, words_b = set(_clean(a).split()), set(_clean(b).split())
    if not words_a or not words_b:
        return 0.0
    common = words_a & words_b
    if common and common in (words_a, words_b):
        return 100.0
    rest_a, rest_b = (" ".join(sorted(words - common)) for words in (words_a, words_b))
    len_common = len(" ".join(common))
    space = 1 if common else 0
    len_a, len_b = (len_common + space + len(rest) for rest in (rest_a, rest_b))
    ratios = [_ratio(_indel_distance(rest_a, rest_b), len_a + len_b)]
    if common:
        ratios += [_ratio(space + len(rest_a), len_common + len_a)]
        ratios += [_ratio(space + len(rest_b), len_common + len_b)]
    return max(ratios)


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


def _ratio(distance: int, length: int) -> float:
    return 100.0 - 100.0 * distance / length


def _indel_distance(a: str, b: str) -> int:
    """Characters to remove from `a` and to insert to get `b`: both lengths - 2 * LCS.

    The LCS is found with one machine word per column, kept in a Python integer (Hyyrö, 2004).
    """
    places: dict[str, int] = {}
    for index, letter in enumerate(a):
        places[letter] = places.get(letter, 0) | 1 << index
    ones = (1 << len(a)) - 1
    column = ones
    for letter in b:
        matches = column & places.get(letter, 0)
        column = (column + matches) | (column - matches)
    return len(a) + len(b) - 2 * (len(a) - (column & ones).bit_count())
