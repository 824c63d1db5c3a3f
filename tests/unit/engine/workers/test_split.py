"""Who computes what."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.engine.workers.split import deal, gather, split_by_tokens, split_requests
from moored.types import Prompt, ScoreRequest


def prompt(*ids: int) -> Prompt:
    return Prompt(np.array(ids))


def test_the_longest_sample_goes_alone_and_two_short_ones_together():
    prompts = [prompt(1, 2), prompt(3, 4), prompt(5, 6)]
    # 12 tokens, then 7, then 6: 12 on one rank, 7 + 6 on the other.
    assert split_by_tokens(prompts, [10, 5, 4], 2) == [0, 1, 1]


def test_samples_of_one_prompt_stay_together_where_that_costs_less():
    shared, other = prompt(*range(50)), prompt(*range(100, 150))
    # 55 and 55 tokens, then 5 more where the prompt already is.
    assert split_by_tokens([shared, other, shared, other], [5, 5, 5, 5], 2) == [0, 1, 0, 1]


def test_a_group_is_divided_where_one_rank_would_have_all_the_work():
    ranks = split_by_tokens([prompt(1)] * 4, [100, 100, 100, 100], 2)
    assert sorted(ranks) == [0, 0, 1, 1]


def test_more_ranks_than_samples_leave_ranks_empty():
    assert deal(["a"], split_by_tokens([prompt(1)], [3], 3), 3) == [["a"], [], []]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 5))
def test_what_is_dealt_out_comes_back_in_order_none_dropped_or_doubled(lengths, size):
    prompts = [prompt(length % 3, 1) for length in lengths]
    ranks = split_by_tokens(prompts, lengths, size)
    items = list(range(len(lengths)))
    assert gather(deal(items, ranks, size), ranks) == items


def test_a_score_request_is_as_long_as_all_its_continuations():
    texts = [[np.zeros(9), np.zeros(9)], [np.zeros(5)], [np.zeros(4)]]
    requests = [ScoreRequest(prompt(i), found) for i, found in enumerate(texts)]
    assert split_requests(requests, 2) == [0, 1, 1]
