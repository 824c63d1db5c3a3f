"""The protocols that hide where things run: `Sampler` writes, `Learner` scores and updates, and
an `Engine` holds both.

No torch here: everything that crosses these interfaces is numpy or plain Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from moored.errors import MooredError
from moored.types import Completion, Message, Prompt, ScoreRequest

if TYPE_CHECKING:
    import torch

    from moored.rollout.episodes import DialogueRenderer
    from moored.rollout.pool import EnvCalls
    from moored.training.samples import LossSample, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How replies are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a reply; the stop token is part of it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """One reply to write."""

    session: int
    """The episode: a later request of the same session extends its earlier prompt and reply, so a
    sampler can keep what it computed."""
    prompt: Prompt
    """Everything before the reply."""
    seed: int
    """The reply is a function of weights, prompt and seed."""
    messages: tuple[Message, ...] = ()
    """The same dialogue before it was rendered, for samplers that take no ids."""


_session_numbers = itertools.count()


def new_session() -> int:
    """A session that no other stream of this process uses; later ones are larger."""
    return next(_session_numbers)


def check_params(params: SamplingParams) -> None:
    """Raise when no reply can be drawn like this."""
    if params.max_tokens < 1:
        raise MooredError(f"max_tokens must be at least 1, got {params.max_tokens}")
    if params.temperature < 0.0:
        raise MooredError(f"temperature must be 0 or more, got {params.temperature}")


def check_text_prompt(prompt: Prompt) -> None:
    """Raise when a text sampler gets an empty prompt, or pictures that it cannot read."""
    if len(prompt.ids) == 0:
        raise MooredError("a prompt needs at least one token to predict the next from")
    if prompt.images:
        raise MooredError(
            "a prompt holds an image, but this sampler reads text only; choose a text view of the "
            "environment"
        )


def check_requests(requests: Sequence[Request], params: SamplingParams) -> None:
    """Raise when no reply can be written."""
    check_params(params)
    for request in requests:
        check_text_prompt(request.prompt)
    if len({request.session for request in requests}) < len(requests):
        raise MooredError("two requests of one call have the same session; give each its own")


class Stream(Protocol):
    """Replies under way, all drawn with the same parameters."""

    is_lockstep: bool
    """True: `poll` writes everything that was submitted, in one batch. Submit what belongs
    together, in a fixed order, before polling; then runs repeat bit by bit."""

    def submit(self, request: Request) -> None:
        """Ask for a reply. A session has at most one request under way."""
        ...

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        """Sessions and replies that are finished; [] when nothing is under way.

        Waits for at least one reply, or about `wait_s` seconds, where other work is at hand.
        `FinishReason.ERROR` gives up on a single reply.
        """
        ...

    def end(self, sessions: Sequence[int]) -> None:
        """These sessions have their last reply: what is kept for them can go.

        Others may be waiting for its room. A class that derives from this one and keeps nothing
        need not define it.
        """

    def close(self) -> None:
        """Forget the sessions that were submitted; what is under way is dropped."""
        ...


class Sampler(Protocol):
    """Writes replies with some policy."""

    def stream(self, params: SamplingParams) -> Stream:
        """Begin to write replies; close the stream when done."""
        ...


class ModelSampler(Sampler, Protocol):
    """A sampler that the weights of a learner are published to."""

    @property
    def version(self) -> int: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...


def write_replies(
    sampler: Sampler, requests: Sequence[Request], params: SamplingParams
) -> list[Completion]:
    """One completion for each request, in order; nothing is kept."""
    with closing(sampler.stream(params)) as stream:
        return write_all(stream, requests, keeps=False)


def write_all(
    stream: Stream, requests: Sequence[Request], *, keeps: bool = True
) -> list[Completion]:
    """One completion for each request, in order; the stream stays open; `keeps`: sessions too."""
    for request in requests:
        stream.submit(request)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        finished = dict(stream.poll())
        found |= finished
        if not keeps:
            stream.end(list(finished))
    return [found[request.session] for request in requests]


class BatchSampler(Protocol):
    """What `LockstepStream` needs: replies to many requests in one call."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order."""
        ...

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Forget what was kept for these sessions."""
        ...


class LockstepStream(Stream):
    """A stream over `generate`: every poll writes everything submitted since the last one."""

    is_lockstep = True

    def __init__(self, sampler: BatchSampler, params: SamplingParams) -> None:
        self._sampler = sampler
        self._params = params
        self._waiting: list[Request] = []
        self._sessions: set[int] = set()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._sessions.add(request.session)

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        requests, self._waiting = self._waiting, []
        if not requests:
            return []
        completions = self._sampler.generate(requests, self._params)
        sessions = (request.session for request in requests)
        return list(zip(sessions, completions, strict=True))

    def end(self, sessions: Sequence[int]) -> None:
        # An episode whose environment failed at once was never submitted.
        known = [session for session in sessions if session in self._sessions]
        if known:
            self._sampler.end_sessions(known)
            self._sessions.difference_update(known)

    def close(self) -> None:
        self._waiting.clear()
        self.end(sorted(self._sessions))


class Scorer(Protocol):
    """Knows how likely a text is."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        """Log-probability of every token of each continuation of each request.

        One call for all: one collective or one round trip, and prompts are computed once.
        """
        ...


class Learner(Scorer, Protocol):
    """Holds the policy that is trained."""

    @property
    def version(self) -> int:
        """Number of optimiser updates so far."""
        ...

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """(T + 1,) the critic's values: before each continuation token, and after the last."""
        ...

    def damaged_weights(self) -> list[str]:
        """Names of weights that are not finite, for the report of a failed step."""
        ...

    def step(
        self, minibatches: Iterable[Sequence[LossSample]], *, lr_factor: float = 1.0
    ) -> Iterator[Mapping[str, float]]:
        """One optimiser update per minibatch of weighted token streams; yields its statistics.

        When one of them is not finite, that update has not been made. The next minibatch may be
        prepared while one is computed.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to continue as if nothing had happened."""
        ...

    def load(self, folder: Path, *, policy_only: bool = False) -> None:
        """Go back to what `save` wrote; `policy_only` leaves out what only training needs."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TermGradients:
    """Gradients of single terms of the loss over single groups, by their inner products."""

    terms: tuple[str, ...]
    products_TPTP: np.ndarray
    """Of term and group with term and group."""
    num_parameters: int
    dimensions: int | None
    """Of the random projection that was taken for the gradients; None: they are exact."""


@runtime_checkable
class GradientLearner(Protocol):
    """What a learner may offer besides, for `moored gradients` and `gradients.every`."""

    def term_gradients(
        self, groups: Sequence[Sequence[LossSample]], *, params: str
    ) -> TermGradients:
        """Gradients of each term over the samples of each group, at the weights as they are.

        Coefficients are part of a term, and all terms and groups add up to the gradient of one
        update. Weights, optimiser and everything random stay as they are.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to an engine, and what it cost."""

    kind: str
    """E.g. `replica_lost`."""
    text: str
    """One sentence for people."""
    figures: Mapping[str, object]
    """For the run log."""


@runtime_checkable
class HasEvents(Protocol):
    """An engine that reports what happens to it: smaller micro-batches, a process that dies."""

    on_event: Callable[[Event], None]
    """Called at once, possibly from the thread that rolls out."""


@runtime_checkable
class ClusterEngine(HasEvents, Protocol):
    """What an engine over several processes offers besides."""

    def restart_learner(self) -> None:
        """Start lost ranks of the learner again, at the weights that the run began with."""
        ...

    def make_pool(self) -> EnvCalls[Any]:
        """Environments where the engine wants them: in this process or elsewhere; close it."""
        ...


class Engine(Protocol):
    """A policy and where it runs: what writes, what scores and what trains it."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def scorer(self) -> Scorer: ...

    @property
    def learner(self) -> Learner:
        """Raises where the policy cannot be trained, e.g. behind a server."""
        ...

    @property
    def renderer(self) -> DialogueRenderer: ...

    def describe(self) -> str:
        """Size of the model and where it runs, in a few words, for the head of a run."""
        ...

    def check(self) -> None:
        """Raise when sampler or learner compute something other than the model does."""
        ...

    def publish(self) -> None:
        """Make the learner's weights the sampler's."""
        ...

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer in Hugging Face format, needing nothing of moored."""
        ...

    def close(self) -> None: ...
