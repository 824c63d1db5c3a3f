"""Fuzzy token sets, colours and nouns."""

from __future__ import annotations

import logging
import random
import sys
from types import SimpleNamespace

import pytest

from moored.envs.webshop import matching
from moored.envs.webshop.matching import (
    COLOURS,
    content_words,
    find_nouns,
    normalize_colour,
    token_set_ratio,
)


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        ("rubber sole", "sole rubber", 100.0),
        ("rubber sole", "soft rubber sole", 100.0),  # all words of one are in the other
        ("", "", 0.0),
        ("+", "+", 0.0),
        ("abc", "xyz", 0.0),
        ("gray", "grey", 75.0),  # 1 - 2/8
        ("a b", "a c", 100 - 100 / 3),  # 1 - 2/6
        ("eco friendly", "environmentally friendly", 80.0),  # friendly / eco friendly: 1 - 4/20
    ],
)
def test_the_token_set_ratio_is_the_one_worked_out_by_hand(a: str, b: str, ratio: float) -> None:
    assert token_set_ratio(a, b) == token_set_ratio(b, a) == pytest.approx(ratio)


def test_the_token_set_ratio_equals_rapidfuzz() -> None:
    fuzz = pytest.importorskip("rapidfuzz.fuzz", reason="the reference is not installed")
    from rapidfuzz.utils import default_process

    rng = random.Random(0)
    words = [
        "steel",
        "steels",
        "free",
        "gluten",
        "blue",
        "x-large",
        "2",
        "pack of 3",
        "é_è",
        "!",
        "",
    ]
    for _ in range(4000):
        a, b = (" ".join(rng.choices(words, k=rng.randint(0, 5))) for _ in range(2))
        if rng.random() < 0.5:
            b = "".join(rng.choices("abcdef -", k=rng.randint(0, 90)))
        assert token_set_ratio(a, b) == pytest.approx(
            fuzz.token_set_ratio(a, b, processor=default_process)
        ), (a, b)


def test_the_first_colour_in_the_alphabet_stands_for_an_option() -> None:
    assert list(COLOURS) == sorted(set(COLOURS))
    assert normalize_colour("light blue") == "blue"
    assert normalize_colour("violet lavender") == "lavender"
    assert normalize_colour("x-large") == "x-large"


def test_without_spacy_all_content_words_count_and_that_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(matching, "has_spacy_model", lambda: False)
    matching._noun_finder.cache_clear()
    with caplog.at_level(logging.INFO, matching.__name__):
        assert find_nouns("The Quick 12 oz Mug, for You") == ["quick", "oz", "mug"]
        assert find_nouns("The Quick 12 oz Mug, for You") == ["quick", "oz", "mug"]
    assert caplog.text.count("compares all content words of two titles instead of") == 1
    matching._noun_finder.cache_clear()
    assert content_words("") == []


def test_where_spacy_and_its_model_are_installed_only_nouns_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tags = {"Quick": "ADJ", "Acme": "PROPN", "Mug": "NOUN"}

    def load(name: str):
        assert name == "en_core_web_sm"
        return lambda text: [SimpleNamespace(text=word, pos_=tags[word]) for word in text.split()]

    monkeypatch.setattr(matching, "has_spacy_model", lambda: True)
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load))
    matching._noun_finder.cache_clear()
    assert find_nouns("Quick Acme Mug") == ["acme", "mug"]
    matching._noun_finder.cache_clear()
