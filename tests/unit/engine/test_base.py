"""Streams of samplers that write in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moored.engine.base import LockstepStream, Request, SamplingParams
from moored.types import Completion, FinishReason, Prompt

PARAMS = SamplingParams(max_tokens=4)


class StrictSampler:
    """Knows the sessions it wrote for, and forgets each once."""

    def __init__(self) -> None:
        self.kept: set[int] = set()

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        self.kept.update(request.session for request in requests)
        reply = Completion(np.array([5]), np.array([-1.0]), FinishReason.STOP, 0)
        return [reply] * len(requests)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self.kept.remove(session)


def test_a_sampler_forgets_each_session_once_and_only_those_it_wrote_for():
    sampler = StrictSampler()
    stream = LockstepStream(sampler, PARAMS)
    for session in (1, 2):
        stream.submit(Request(session=session, prompt=Prompt(np.array([3])), seed=0))
    stream.poll()
    stream.end([1, 7])  # 7: an episode whose environment failed before its first prompt
    assert sampler.kept == {2}
    stream.end([1])
    stream.close()
    assert sampler.kept == set()
