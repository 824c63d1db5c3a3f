"""Requests over the ranks of a team, without any process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moored.engine.base import Request, SamplingParams, write_replies
from moored.engine.workers.sampler import Places, TeamSampler
from moored.types import Completion, FinishReason, Prompt

PARAMS = SamplingParams(max_tokens=4)


def request(session: int, *ids: int) -> Request:
    return Request(session=session, prompt=Prompt(np.array(ids)), seed=session)


class FakeTeam:
    """Two ranks that answer with their own number; on streams, one reply in each poll."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self._queues: list[list[Request]] = [[], []]

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, /, *args: Any
    ) -> list[Any]:
        parts = [[] if per_rank is None else per_rank[rank][0] for rank in range(2)]
        if method == "generate":
            return [[reply(rank) for _ in parts[rank]] for rank in range(2)]
        if method == "poll_stream":
            assert per_rank is not None
            self.calls.append((method, [ended for _, ended in per_rank]))
            return [self._poll(rank, parts[rank]) for rank in range(2)]
        self.calls.append((method, parts))
        return [None, None]

    def _poll(self, rank: int, requests: list[Request]) -> list[tuple[int, Completion]]:
        self._queues[rank] += requests
        return [(self._queues[rank].pop(0).session, reply(rank))] if self._queues[rank] else []

    def close(self) -> None:
        pass


def reply(rank: int) -> Completion:
    return Completion(
        token_ids=np.array([rank]),
        logprobs=np.zeros(1),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )


def test_a_group_goes_to_one_rank_and_three_groups_to_two_ranks():
    places = Places(2)
    groups = [request(10 * group + member, group) for group in range(3) for member in range(2)]
    assert places.place(groups) == [0, 0, 1, 1, 0, 0]


def test_a_session_stays_where_its_cache_is():
    places = Places(2)
    assert places.place([request(0, 1), request(1, 2)]) == [0, 1]
    # The second turn of session 1 comes with a new session, which goes to the emptier rank.
    assert places.forget([0, 0, 7]) == [[0], []]
    assert places.place([request(1, 2, 3), request(2, 9)]) == [1, 0]


@pytest.mark.parametrize("streams", [False, True])
def test_every_request_gets_the_reply_of_its_rank(streams):
    team = FakeTeam()
    sampler = TeamSampler(team, streams=streams)
    found = write_replies(sampler, [request(0, 1), request(1, 2), request(2, 1)], PARAMS)
    assert [int(each.token_ids[0]) for each in found] == [0, 1, 0]
    name, parts = team.calls[-1]
    assert name == ("close_stream" if streams else "end_sessions")
    assert streams or parts == [[0, 2], [1]]


def test_the_rank_of_a_session_hears_that_it_has_ended():
    team = FakeTeam()
    stream = TeamSampler(team, streams=True).stream(PARAMS)
    for number in range(2):
        stream.submit(request(number, number))
    assert [session for session, _ in stream.poll()] == [0, 1]
    stream.end([1])
    stream.submit(request(2, 2))  # on the rank that is free again
    assert [int(each.token_ids[0]) for _, each in stream.poll()] == [1]
    assert team.calls[-1] == ("poll_stream", [[], [1]])
