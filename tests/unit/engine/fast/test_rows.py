"""What was drawn, as completions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moored.engine.base import Request, SamplingParams
from moored.engine.fast.rows import State, check_fast_params, make_completions
from moored.engine.fast.slots import Session
from moored.errors import MooredError
from moored.types import Completion, FinishReason, Prompt

PARAMS = SamplingParams(max_tokens=3, stop_ids=(1,))
TOKENS = np.array([[7, 1, 9], [5, 6, 8]], dtype=np.int32)


def complete(
    logps: list[list[float]], lengths: list[int], tokens: np.ndarray = TOKENS
) -> tuple[list[Completion], list[Session]]:
    prompt = Prompt(np.array([3, 4]))
    requests = [Request(session=s, prompt=prompt, seed=s) for s in range(2)]
    sessions = [Session(slot=s, prefix=s, prefix_length=0, ids=prompt.ids) for s in range(2)]
    rows = list(zip(requests, sessions, strict=True))
    found = make_completions(tokens, np.array(logps, dtype=np.float32), lengths, rows, PARAMS, 4)
    return found, sessions


def test_a_completion_ends_where_its_reply_does_and_its_session_lacks_the_last_token():
    (first, second), sessions = complete([[-1.0, -2.0, -9.0], [-3.0, -4.0, -5.0]], [2, 3])
    assert (first.token_ids.tolist(), first.logprobs.tolist()) == ([7, 1], [-1.0, -2.0])
    assert (second.token_ids.tolist(), second.logprobs.tolist()) == ([5, 6, 8], [-3.0, -4.0, -5.0])
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert [session.ids.tolist() for session in sessions] == [[3, 4, 7], [3, 4, 5, 6]]
    assert first.token_ids.dtype == np.int64 and first.policy_version == 4


def test_tokens_may_be_overwritten_once_there_are_completions():
    tokens = TOKENS.copy()
    (first, _), sessions = complete([[-1.0] * 3] * 2, [2, 3], tokens)
    tokens[:] = 0
    assert first.token_ids.tolist() == [7, 1] and sessions[0].ids.tolist() == [3, 4, 7]


def test_what_lies_behind_a_reply_need_not_be_finite():
    left_over = [[-1.0, -2.0, np.nan], [-3.0, -4.0, -5.0]]
    (first, _), _ = complete(left_over, [2, 3])
    assert first.logprobs.tolist() == [-1.0, -2.0]
    with pytest.raises(MooredError, match="not finite"):
        complete(left_over, [3, 3])


def test_replies_are_those_of_the_lanes_in_their_order():
    state = State(num_rows=3, max_tokens=4, idle_slot=3, device=torch.device("cpu"))
    state.out_tokens[:] = torch.arange(12, dtype=torch.int32).view(3, 4)
    state.out_logps[:] = -torch.arange(12, dtype=torch.float32).view(3, 4)
    # Lane 0 writes to line 2, lane 1 to line 0.
    state.requests[:2] = torch.tensor([2, 0])
    state.counts[:2] = torch.tensor([2, 1])
    state.running[:2] = torch.tensor([1, 0])
    tokens, logps = state.replies(num_rows=2, longest=2).numpy()
    assert tokens.tolist() == [[2, 8, 9], [1, 0, 1]]
    assert logps[:, 0].tolist() == [1, 0]
    assert logps[:, 1:].view(np.float32).tolist() == [[-8.0, -9.0], [0.0, -1.0]]


def test_more_tokens_that_end_replies_than_there_is_room_for_are_refused_with_what_to_do():
    check_fast_params(SamplingParams(max_tokens=1, stop_ids=tuple(range(8))))
    with pytest.raises(MooredError, match=r"8 tokens at most, got 9; name fewer .*sampler=plain"):
        check_fast_params(SamplingParams(max_tokens=1, stop_ids=tuple(range(9))))
