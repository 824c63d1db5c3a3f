"""Completions of other trainers as groups: spans in token ids, rows by prompt."""

from __future__ import annotations

import numpy as np
import pytest

from moored.errors import MooredError
from moored.integrations.completions import group_completions, think_span

PIECES = ["<think>", "</think>", "go", " left", "<th", "ink>", "x</th", "é"]


def decode(ids: list[int]) -> str:
    """Ids below 100 are pieces; 100 and 101 are the two bytes of é."""
    data = b"".join(
        bytes([0xC3, 0xA9][i - 100 : i - 99]) if i >= 100 else PIECES[i].encode() for i in ids
    )
    return data.decode(errors="replace")


def test_the_span_lies_between_the_tags():
    assert think_span([2, 0, 2, 3, 1, 3], decode) == (2, 4)


def test_tags_may_take_several_tokens():
    assert think_span([4, 5, 2, 3, 1], decode) == (2, 4)


def test_a_token_that_holds_text_and_tag_belongs_to_the_tag():
    # <think> go x</th ink>: "x" is lost to the closing tag.
    assert think_span([0, 2, 6, 5], decode) == (1, 2)


def test_a_character_of_two_tokens_before_the_closing_tag_is_kept():
    assert think_span([0, 2, 100, 101, 1], decode) == (1, 4)


def test_a_prompt_may_end_with_the_opening_tag():
    assert think_span([2, 3, 1, 2], decode, is_open=True) == (0, 2)
    assert think_span([2, 3, 1, 2], decode) is None


@pytest.mark.parametrize("ids", [[], [2, 3], [0, 2, 3], [1, 0, 2]])
def test_a_missing_tag_gives_no_span(ids):
    assert think_span(ids, decode) is None


def test_an_empty_reasoning_is_an_empty_span():
    assert think_span([0, 1], decode) == (1, 1)


def test_rows_with_equal_prompts_make_a_group():
    groups = group_completions([[1, 2], [3], [1, 2]], [[5, 6], [7], [8]], [(0, 1), None, (0, 1)])
    assert [len(group.trajectories) for group in groups] == [2, 1]
    first = groups[0].trajectories[1].turns[0]
    assert (first.prompt.ids.tolist(), first.reasoning_ids.tolist()) == ([1, 2], [8])
    assert len(groups[1].trajectories[0].turns[0].reasoning_ids) == 0


def test_without_spans_the_whole_completion_is_reasoning():
    (group,) = group_completions([np.array([1])], [np.array([5, 6])])
    assert group.trajectories[0].turns[0].reasoning_ids.tolist() == [5, 6]


def test_texts_are_not_token_ids():
    with pytest.raises(MooredError, match="are token ids, got 'go left'; encode texts"):
        group_completions([[1]], ["go left"])  # pyright: ignore[reportArgumentType]


def test_rows_of_unequal_number_are_an_error():
    with pytest.raises(MooredError, match="got 2, 1 and 1"):
        group_completions([[1], [2]], [[5]])
