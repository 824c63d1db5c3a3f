"""What brackets hold: the text of one action, or the end of one and another."""

from __future__ import annotations

import pytest

from moored.envs.brackets import holds_two

VERBS = ("search", "click")


@pytest.mark.parametrize(
    "text",
    [
        *("red shoes", "search for a click", "[2 pack] word search [x]", "buy [now]"),
        *("a [b] c", "research [1]", "a] b"),
    ],
)
def test_brackets_inside_a_text_are_part_of_it(text):
    assert not holds_two(text, VERBS)


@pytest.mark.parametrize(
    "text",
    [
        *("a] search[b", "a] Click [b", "a]\nsearch[b", "a] || look at b", "a] look[b"),
        *("[2 pack]] click[b", "a]_click[b"),
    ],
)
def test_an_end_and_another_action_are_two(text):
    assert holds_two(text, VERBS)
