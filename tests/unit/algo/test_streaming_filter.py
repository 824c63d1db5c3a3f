"""The filter for trainers that hand over one group at a time."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from moored.algo import StreamingTopP
from moored.errors import MooredError

NAN = math.nan


def test_streaming_filter_keeps_what_batch_top_p_keeps_of_its_window():
    stream = StreamingTopP(0.9, window=4, warmup=0)
    # Windows: [4] -> keep; [4, 1]: 4.5 of 5 needed, both -> keep; [4, 1, 0] -> zero never kept;
    # [4, 1, 0, 0.2]: 4.68 of 5.2 needed, 4 + 1 reach it -> drop; [1, 0, 0.2, 0.2]: 1.26 of 1.4
    # needed, all three -> keep.
    assert [stream.offer(s) for s in (4, 1, 0, 0.2, 0.2)] == [True, True, False, False, True]


def test_streaming_filter_warms_up_with_all_but_zero_scores():
    stream = StreamingTopP(0.5, warmup=3)
    assert [stream.offer(s) for s in (9, 0, 1, 1)] == [True, False, True, False]


def test_streaming_filter_continues_from_its_saved_state():
    scores = np.random.default_rng(0).random(50).tolist()
    whole, first, second = (StreamingTopP(0.8, window=16) for _ in range(3))
    expected = [whole.offer(s) for s in scores]
    begun = [first.offer(s) for s in scores[:20]]
    second.load_state_dict(first.state_dict())
    assert begun + [second.offer(s) for s in scores[20:]] == expected


def test_a_refused_score_leaves_the_stream_as_it_was():
    stream = StreamingTopP(0.9, warmup=0)
    stream.offer(1.0)
    before = stream.state_dict()
    for score in (NAN, math.inf, -1.0):
        with pytest.raises(MooredError, match="finite and >= 0"):
            stream.offer(score)
    assert stream.state_dict() == before
    with pytest.raises(MooredError, match="share"):
        StreamingTopP(-0.5)


def test_streaming_answers_are_plain_booleans():
    stream = StreamingTopP(0.5, warmup=2)
    scores = [np.float64(1.0), np.float32(0.0), np.float64(2.0), np.float64(0.1), np.float64(0)]
    answers = [stream.offer(score) for score in scores]
    assert answers == [True, False, True, False, False]
    assert {type(answer) for answer in answers} == {bool}
    json.dumps(stream.state_dict())
