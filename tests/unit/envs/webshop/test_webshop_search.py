"""The shop's search engine against weights worked out by hand."""

from __future__ import annotations

import math

from moored.envs.webshop.search import SearchIndex, split_words


def test_the_best_match_comes_first_and_ties_keep_their_order() -> None:
    index = SearchIndex(["red shoes", "blue shoes", "red red hat", "green coat"])
    assert index.search("red hat", 10) == [2, 0]
    assert index.search("shoe", 10) == [0, 1]
    assert index.search("shoe", 1) == [0]


def test_the_weights_are_those_of_bm25() -> None:
    index = SearchIndex(["a1 b1", "a1 a1 c1 d1"])  # lengths 2 and 4, mean 3
    rarity = math.log(1 + 0.5 / 2.5)  # in both of 2 documents
    norms = [0.9 * (0.6 + 0.4 * length / 3) for length in (2, 4)]
    expected = [rarity * 1 / (1 + norms[0]), rarity * 2 / (2 + norms[1])]
    _, weights = index._postings["a1"]
    assert [round(x, 12) for x in weights] == [round(x, 12) for x in expected]


def test_words_nobody_uses_find_nothing() -> None:
    index = SearchIndex(["red shoes"])
    for query in ("hat", "the of and", "", "🦆", "\ud800"):
        assert index.search(query, 10) == []
    assert SearchIndex([]).search("red", 10) == []


def test_a_repeated_word_counts_once_and_a_long_query_is_cut() -> None:
    index = SearchIndex(["red shoes", "blue shoes blue"])
    assert index.search("red red red blue", 10) == index.search("red blue", 10)
    assert index.search("x " * 64 + "red", 10) == []


def test_plurals_and_stop_words_do_not_count() -> None:
    assert split_words("The Dresses of the boss, 12 mugs!") == ["dresse", "boss", "12", "mug"]
