"""Exact match and F1 equal SQuAD's and HotpotQA's, on cases worked out by hand."""

from __future__ import annotations

import pytest

from moored.envs.search import exact_match, f1
from moored.envs.search.scoring import answer_reward, normalize_answer


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Amber\tDoor!", "amber door"),
        ("an apple a day", "apple day"),
        ("U.S.A.", "usa"),
        # Punctuation goes first, so the letters around it join.
        ("rock-and-roll", "rockandroll"),
        ("the-end", "theend"),
        ("Theory of a theme", "theory of theme"),
        # Only ASCII punctuation counts.
        ("“Amber”", "“amber”"),
        ("The", ""),
        ("...", ""),
    ],
)
def test_text_is_normalised_as_squad_does(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("prediction", "answers", "is_match"),
    [
        ("the Amber Door.", "Amber door", True),
        ("Amber Doors", "Amber door", False),
        ("1,200", ["1200"], True),
        ("Paris", ["London", "paris"], True),
        ("Paris", [], False),
        ("", ["Paris"], False),
        ("The", ["a"], True),
        ("ß", ["SS"], False),
    ],
)
def test_an_exact_match_needs_one_equal_answer(prediction, answers, is_match):
    assert exact_match(prediction, answers) is is_match


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("Amber Door", "the amber door", 1.0),
        # 1 of 2 predicted words is right, 1 of 3 expected ones is found: 2 · 1 / (2 + 3).
        ("amber gate", "big amber door", 0.4),
        # A word counts as often as both have it: 2 shared of 3 and 2.
        ("york york york", "York, York", 0.8),
        ("new york york", "york", 0.5),
        ("Chief of Protocol", ["Chief of Staff", "Protocol"], 2 * 2 / 6),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "an", 1.0),
        ("Paris", [], 0.0),
        # Of several answers the best counts: 2 · 1 / (1 + 2) against 0.
        ("Ada", ["Grace Hopper", "Ada Lovelace"], 2 / 3),
    ],
)
def test_f1_counts_shared_words(prediction, answers, expected):
    assert f1(prediction, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("yes no", "yes", 0.0),  # 2 / 3 by shared words, whatever the question
        ("Yes, the same", "yes", 0.0),
        ("no", "no man's land", 0.0),
        ("No.", "no", 1.0),
        ("no answer", "noanswer", 0.0),
        ("no answer", "no answer", 1.0),
        ("no man", "no man's land", 2 / 5),  # neither is a verdict
        ("yes no", ["yes", "yes no maybe"], 4 / 5),
    ],
)
def test_yes_no_and_noanswer_are_right_as_a_whole_or_not_at_all(prediction, answers, expected):
    """As in HotpotQA's script, hotpot_evaluate_v1.py."""
    assert f1(prediction, answers) == pytest.approx(expected, abs=1e-12)
    assert answer_reward(prediction, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "reward"),
    [
        ("the amber door", "Amber Door", 1.0),
        ("amber", "amber door", 2 / 3),
        # All words right, in another order: F1 1, though not an exact match.
        ("door amber", "amber door", 1.0),
        # 2 · 1 / (1 + 5) = 0.33 is enough, 2 · 1 / (1 + 6) = 0.29 is not.
        ("amber", "amber b c d e", 1 / 3),
        ("amber", "amber b c d e f", 0.0),
        # Exactly 0.3: 2 · 3 / (10 + 10).
        ("x y z k l m n o p q", "x y z 1 2 3 4 5 6 7", 0.3),
        ("london", "paris", 0.0),
    ],
)
def test_an_inexact_answer_earns_its_f1_from_0_3_on(prediction, answer, reward):
    assert answer_reward(prediction, answer) == pytest.approx(reward, abs=1e-12)
