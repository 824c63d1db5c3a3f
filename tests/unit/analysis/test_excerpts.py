"""Prompts are shown from where they differ, whatever they share."""

from __future__ import annotations

from moored.analysis.excerpts import CONTEXT, Excerpts, differing_parts


def test_prompts_are_shown_from_shortly_before_they_differ():
    rules = "rules\n" * 50
    first, second = differing_parts([f"{rules}room 1 end", f"{rules}room 2 end"])
    assert first.startswith("…\nrules\n") and first.endswith("room 1 end")
    assert len(first) < CONTEXT * 2 and second.endswith("room 2 end")
    assert differing_parts(["a", "b"]) == ["a", "b"]
    assert differing_parts(["x" * 900, "y"])[0] == "x" * 600 + " …"


def test_a_prompt_that_came_before_others_showed_where_they_differ_is_shown_from_there_too():
    # The first two differ after 300 characters, the third after 200.
    start, more = "s" * 200, "m" * 100
    shown = differing_parts([f"{start}{more}1", f"{start}{more}2", f"{start}other"])
    assert [text[-102:] for text in shown[:2]] == [f"s{more}1", f"s{more}2"]
    assert shown[2].endswith("sother") and all(text.startswith("…\ns") for text in shown)


def test_equal_prompts_are_shown_from_their_beginning():
    assert differing_parts(["the same task"] * 2) == ["the same task"] * 2


def test_only_what_is_shown_is_kept():
    excerpts = Excerpts(most_chars=10)
    for number in range(100):
        excerpts.add("r" * 5000 + f"{number:02d}" + "t" * 5000)
    kept = sum(len(text) for _, text, _ in excerpts._kept)
    assert kept <= 100 * 10
