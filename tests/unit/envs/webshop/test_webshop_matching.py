"""Fuzzy token sets, colours and nouns."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from moored.envs.webshop import matching
from moored.envs.webshop.matching import (
    COLOURS,
    content_words,
    find_nouns,
    is_close,
    normalize_colour,
)


@pytest.mark.parametrize(
    ("a", "b", "close"),
    [
        ("rubber sole", "sole rubber", True),
        ("Rubber-sole!", "soft rubber sole", True),  # all words of one are in the other
        ("", "", False),
        ("+", "+", False),
        ("gray", "grey", False),  # 1 - 2/8
        ("eco friendly", "environmentally friendly", False),  # friendly: 1 - 4/20
        ("abcdefg", "abcdefg2", True),  # 1 - 1/15
        ("wall sconce", "walİsconce", True),  # İ in lower case is an i and a mark: 1 - 2/22
    ],
)
def test_words_are_close_when_few_letters_differ(a: str, b: str, close: bool) -> None:
    assert is_close(a, b) is is_close(b, a) is close


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
