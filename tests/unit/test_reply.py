"""Replies taken apart by their tags."""

import tracemalloc

import pytest

from moored.reply import (
    Reply,
    ends_open,
    find_answer,
    find_parts,
    find_think,
    format_reply,
    join_reasoning,
    open_think,
    parse_actions,
    parse_reply,
)

GOOD = "<think>I see.</think><answer>Up</answer>"


def test_a_reply_comes_apart_as_it_was_put_together():
    assert format_reply("I see.", "Up") == GOOD
    assert parse_reply(f"Well: {GOOD} done") == Reply("I see.", "Up")
    assert find_parts(GOOD) == ((7, 13), (29, 31))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Up",
        "<think>a</think>",
        "<think>a</think> so: <answer>Up</answer>",
        "<answer>Up</answer><think>a</think>",
        "<think>a</think><answer>Up</answer><answer>Down</answer>",
        "<THINK>a</THINK><ANSWER>Up</ANSWER>",
    ],
)
def test_tags_that_are_missing_doubled_or_out_of_order_make_a_reply_invalid(text):
    assert parse_reply(text) == Reply(None, None)
    assert find_parts(text) is None


def test_no_text_is_kept_once_it_was_read():
    tracemalloc.start()
    try:
        for index in range(10):
            assert parse_reply(format_reply("x" * 1_000_000, str(index))).is_valid
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "is_open", "span"),
    [
        ("<think>abc</think>d", None, (7, 10)),
        ("abc</think>d", None, (0, 3)),
        ("abc</think>d", False, None),
        ("abc</think>d", True, (0, 3)),
        ("<think>abc", None, None),
        ("<think>abc", False, None),
        ("a</think><think>b</think>", None, (0, 1)),
        ("a</think><think>b</think>", False, (16, 17)),
        ("<think>abc</think>d", True, (0, 10)),
    ],
)
def test_reasoning_is_found_with_what_is_known_of_the_prompt(text, is_open, span):
    assert find_think(text, is_open=is_open) == span


def test_reasoning_is_found_between_other_tags():
    assert find_think("[[abc]]", ("[[", "]]")) == (2, 5)


def test_a_prompt_may_leave_the_opening_tag_to_the_reply():
    assert ends_open("assistant: <think>\n")
    assert not ends_open("assistant: <think>\n\n</think>")
    assert open_think("user: a<think>b</think> assistant: <think>\n") == "<think>\n"
    assert open_think("assistant: <think>\n\n</think>") == ""


def test_the_last_answer_counts_and_text_without_tags_is_the_answer():
    assert find_answer("<answer>Up</answer> no: <answer> Down </answer>") == "Down"
    assert find_answer("<answer>Up") == "Up"
    assert find_answer(" 42\n") == "42"


@pytest.mark.parametrize(
    ("reasoning", "content", "reply"),
    [
        ("", "plain", "plain"),
        ("hm", "<answer>Up</answer>", "<think>hm</think><answer>Up</answer>"),
        ("hm", "", "<think>hm</think>"),
        ("hm", GOOD, GOOD),
        ("", "hm</think><answer>Up</answer>", "<think>hm</think><answer>Up</answer>"),
    ],
)
def test_reasoning_is_put_back_before_the_content(reasoning, content, reply):
    assert join_reasoning(reasoning, content) == reply


def test_actions_are_read_in_any_case_and_all_or_none():
    assert parse_actions(" up || LEFT", ["Up", "Left"]) == ["Up", "Left"]
    assert parse_actions("Up || jump", ["Up", "Left"]) is None
    assert parse_actions("Up ||", ["Up", "Left"]) is None
