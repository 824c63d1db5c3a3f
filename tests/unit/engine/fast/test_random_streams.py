"""Streams in random use: few slots, shared prompts, sessions that end early or change, closing.

Whatever happens around a reply, its log-probabilities are those of a plain forward pass; a cell of
the cache that somebody else wrote, or that a row did not find, would change them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch

from moored.engine.base import Request, SamplingParams
from moored.engine.fast import sampler as samplers
from moored.engine.fast import stream as slot_stream
from moored.engine.fast.capture import Fetch
from moored.engine.fast.sampler import SlotSampler
from moored.types import Completion, Prompt
from tests.tiny_model import tiny_model
from tests.unit.engine.fast.test_samplers import plain_logprobs

STOPS = (1, 2, 3)
Replies = list[tuple[Request, Completion]]


def check_slots(sampler: SlotSampler, waiting: Collection[Request] = ()) -> None:
    """Every slot is free or has one owner, and every shared one has users, or is waited for."""
    slots = sampler.slots
    free, sessions = slots.num_free, slots.sessions.values()
    own, shared = [s.slot for s in sessions], {s.prefix for s in sessions if s.prefix != s.slot}
    assert len(set(own)) == len(own) == slots.num_rows - free[0]
    shared |= {slots._prompts[r.prompt.key] for r in waiting if r.prompt.key in slots._prompts}
    assert len(shared) == slots.idle - slots.num_rows - free[1]


class Case:
    """One sampler, used at random."""

    def __init__(self, sampler: SlotSampler, rng: np.random.Generator) -> None:
        self.sampler, self.rng = sampler, rng
        self.prompts = [rng.integers(4, 64, size=size) for size in (1, 5, 9, 14)]
        self.replies: Replies = []
        self.num_sessions = 0

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=int(self.rng.choice([1, 2, 9, 40])), stop_ids=STOPS)

    def first(self) -> Request:
        self.num_sessions += 1
        prompt = self.prompts[self.rng.integers(len(self.prompts))]
        return Request(session=self.num_sessions, prompt=Prompt(prompt), seed=self.num_sessions)

    def after(self, request: Request, reply: Completion) -> Request:
        """Goes on, or begins another dialogue in the same session."""
        ids = np.concatenate([request.prompt.ids, reply.token_ids, self.rng.integers(4, 64, 3)])
        chosen = self.prompts[1] if self.rng.random() < 0.1 else ids
        return Request(session=request.session, prompt=Prompt(chosen), seed=len(self.replies))

    def batch(self) -> None:
        requests = [self.first() for _ in range(self.rng.integers(1, 12))]
        replies = self.sampler.generate(requests, self.params())
        self.replies += zip(requests, replies, strict=True)

    def stream(self) -> None:
        """Until most sessions are over; the rest is dropped."""
        stream = self.sampler.stream(self.params())
        assert isinstance(stream, slot_stream.SlotStream)
        under_way = {r.session: r for r in (self.first() for _ in range(self.rng.integers(1, 25)))}
        for request in under_way.values():
            stream.submit(request)
        fewest = self.rng.choice([0, 0, 5])
        while len(under_way) > fewest:
            for session, reply in stream.poll(None if self.rng.random() < 0.5 else 0.0):
                request = under_way.pop(session)
                self.replies.append((request, reply))
                if self.rng.random() < 0.4:
                    stream.end([session])
                else:
                    under_way[session] = self.after(request, reply)
                    stream.submit(under_way[session])
            check_slots(self.sampler, stream._queue)
        stream.close()
        check_slots(self.sampler)


@pytest.mark.parametrize("seed", range(6))
def test_replies_are_those_of_the_model_whatever_happens_around_them(monkeypatch, seed):
    model, rng = tiny_model(scale=3.0).eval(), np.random.default_rng(seed)
    # Chunks of 1 to 8 steps, and few lanes or many idle ones.
    monkeypatch.setattr(slot_stream, "FEWEST_STEPS", 1)
    monkeypatch.setattr(slot_stream, "MOST_STEPS", 8)
    monkeypatch.setattr(samplers, "MIN_ROWS", int(rng.choice([1, 8])))
    monkeypatch.setattr(Fetch, "is_done", property(lambda _: rng.random() < 0.5))
    sampler = SlotSampler(model, dtype=torch.float32, max_context=32, streams=True)
    most = rng.choice([1, 3, 6, 12, 16])
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: int(most))
    case = Case(sampler, rng)
    for is_batch in rng.random(8) < 0.3:
        (case.batch if is_batch else case.stream)()
    assert case.replies
    for request, reply in case.replies:
        expected = plain_logprobs(model, request.prompt.ids, reply.token_ids)
        np.testing.assert_allclose(reply.logprobs, expected, rtol=1e-4, atol=1e-4)
