"""What runs inside the actor of one sampler replica: a sampler over its own copy of the weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moored.config import Config
from moored.engine.base import ModelSampler, Request, SamplingParams, Stream
from moored.engine.ray.weights import Meeting, Packed, unpack_weights
from moored.engine.workers.team import WorkerLost
from moored.types import Completion, FinishReason, Prompt

if TYPE_CHECKING:
    from moored.engine.ray.circle import Receiver

POLL_S = 0.02
"""How long a call waits for a finished reply before it looks for new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Where a replica runs."""

    pid: int
    node: str
    is_lockstep: bool
    version: int
    """Of its weights."""


Packet = tuple[int, np.ndarray, int]
"""Session, ids of the prompt and seed of a request: what a replica needs of it, quick to pickle."""
Reply = tuple[int, np.ndarray, np.ndarray, str, int, str]
"""Session and the fields of a `Completion`."""


def to_packet(request: Request) -> Packet:
    return request.session, request.prompt.ids, request.seed


def to_completion(reply: Reply) -> tuple[int, Completion]:
    session, ids, logprobs, reason, version, error = reply
    return session, Completion(ids, logprobs, FinishReason(reason), version, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One call of a replica: what to write, with which weights."""

    stream: int
    """Requests of an earlier stream are forgotten when a new one comes."""
    params: SamplingParams
    version: int
    requests: tuple[Packet, ...]
    ended: tuple[int, ...] = ()
    """Sessions that have their last reply."""


MakeSampler = Callable[[Config], ModelSampler]


class Replica:
    """Writes replies; an actor that Ray restarts is back at the weights of version 0."""

    def __init__(self, make: MakeSampler, config: Config) -> None:
        self._make, self._config = make, config
        self._stream: Stream | None = None
        self._number = -1

    @cached_property
    def _sampler(self) -> ModelSampler:
        """Made by the first call, which can tell what is wrong with it; an actor cannot."""
        return self._make(self._config)

    @cached_property
    def _receiver(self) -> Receiver:
        from moored.engine.ray.circle import Receiver

        return Receiver()

    def about(self) -> About:
        import ray

        params = SamplingParams(max_tokens=1)
        return About(
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            is_lockstep=self._sampler.stream(params).is_lockstep,
            version=self._sampler.version,
        )

    def load(self, weights: Packed | None, version: int) -> About:
        """Take over weights; None stands for those that the model was loaded with."""
        sampler = self._sampler
        with _die_of_losses():
            self.end_stream(self._number)
            if weights is not None:
                sampler.load_weights(unpack_weights(weights), version)
        return self.about()

    def receive(self, meeting: Meeting, version: int) -> About:
        """Take over the weights that the learner sends to a meeting, unless it is called off."""
        from moored.engine.ray.circle import CalledOff

        sampler = self._sampler
        with _die_of_losses():
            self.end_stream(self._number)
            try:
                weights = self._receiver.weights(meeting)
            except CalledOff:
                return self.about()
            sampler.load_weights(weights, version)
            for _ in weights:  # a sampler may not ask for the end, but others wait for it
                pass
        return self.about()

    def work(self, order: Order) -> list[Reply] | None:
        """Write on; replies that are finished, or None when the weights are not those asked for."""
        with _die_of_losses():
            return self._work(order)

    def _work(self, order: Order) -> list[Reply] | None:
        if self._sampler.version != order.version:
            return None
        if order.stream != self._number or self._stream is None:
            self.end_stream(self._number)
            self._stream, self._number = self._sampler.stream(order.params), order.stream
        self._stream.end(order.ended)
        for session, ids, seed in order.requests:
            self._stream.submit(Request(session=session, prompt=Prompt(ids), seed=seed))
        return [
            (session, c.token_ids, c.logprobs, c.finish_reason.value, c.policy_version, c.error)
            for session, c in self._stream.poll(POLL_S)
        ]

    def end_stream(self, number: int) -> None:
        """Forget the sessions of a stream."""
        if self._stream is not None and number == self._number:
            self._stream.close()
            self._stream = None


@contextmanager
def _die_of_losses() -> Iterator[None]:
    """End the actor where its sampler has lost a process of its own: Ray starts a whole one."""
    try:
        yield
    except WorkerLost as error:
        print(f"a sampler replica ends: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def make_sampler(config: Config) -> ModelSampler:
    """The sampler that `engine` of a configuration asks for, over weights of its own."""
    # Only here: the driver needs no torch for its replicas.
    from moored.engine import samplers
    from moored.engine.device import pick_device, uses_bf16
    from moored.engine.lora import plain_weights
    from moored.engine.vllm.support import check_vllm
    from moored.models.load import load_model
    from moored.models.outline import read_outline

    device = pick_device(config.engine.device)
    exact = not uses_bf16(config.engine.dtype, device)
    if config.engine.sampler == "vllm":
        check_vllm(config, in_ranks=True)
        # Weights go from their files to vLLM one at a time, where they can be read so.
        outline = read_outline(config.model, exact=exact)
        if outline is not None:
            return samplers.make_sampler(outline.model, config, weights=outline.weights())
        device = pick_device("cpu")
    model = load_model(config.model, device, exact=exact).model
    return samplers.make_sampler(model, config, weights=plain_weights(model))
