"""Dialogues as training samples: rendered, cut to the context, and weighted for one update.

The replies of the assistant are the loss tokens, their end of turn included; everything else is
what they are conditioned on. Shape legend: T tokens of a continuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from moored.errors import MooredError
from moored.rollout.episodes import DialogueRenderer
from moored.sft.source import Source
from moored.training.algorithms import Algorithm
from moored.training.losses import imitation
from moored.training.samples import (
    LossSample,
    Sample,
    TokenAdvantages,
    build_samples,
    token_weights,
)
from moored.training.update import loss_samples
from moored.types import Group, Message, Prompt, StopReason, Trajectory, Turn

MOST_TOO_LONG = 100
"""Dialogues in a row of which not even the first reply fits."""


def imitate(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Every demonstration is as good as any other."""
    return np.ones(len(rewards))


IMITATION = Algorithm(advantage=imitate, aggregation="token_mean", loss=imitation)
"""Supervised learning: the mean negative log-probability of the replies' tokens."""


@runtime_checkable
class ReplyRenderer(DialogueRenderer, Protocol):
    """A renderer that also knows how a model writes a reply."""

    def reply_ids(self, reply: str) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """One dialogue as an update takes it."""

    samples: list[Sample]
    """None when not even its first reply fits into the context."""
    num_replies: int
    """Of the whole dialogue."""

    @property
    def is_cut(self) -> bool:
        return sum(int(s.turn_ends_T.sum()) for s in self.samples) < self.num_replies


@dataclass(frozen=True, slots=True, eq=False)
class PackedLessons:
    """Lessons as few arrays: to unpickle each of theirs would take longer than an update."""

    ids: np.ndarray
    """Prompt and continuation of each sample, one after another."""
    is_loss: np.ndarray
    """For the tokens of all continuations: `loss_mask_T`, and below `turn_ends_T`."""
    is_end: np.ndarray
    sizes: list[tuple[int, int]]
    """Tokens of the prompt and of the continuation of each sample."""
    counts: list[tuple[int, int]]
    """Samples and replies of each lesson."""

    def unpacked(self) -> list[Lesson]:
        samples, at, place = [], 0, 0
        for prompt, length in self.sizes:
            own, start = slice(place, place + length), at + prompt
            samples.append(
                Sample(
                    prompt=Prompt(self.ids[at:start]),
                    ids_T=self.ids[start : start + length],
                    loss_mask_T=self.is_loss[own],
                    old_logprobs_T=np.zeros(length),
                    turn_ends_T=self.is_end[own],
                    rewards_T=np.zeros(length),
                    group=0,
                    trajectory=0,
                )
            )
            at, place = start + length, own.stop
        rest = iter(samples)
        return [Lesson(list(islice(rest, count)), replies) for count, replies in self.counts]


def pack_lessons(lessons: Sequence[Lesson]) -> PackedLessons | list[Lesson]:
    """What another process sends; lessons with pictures as they are."""
    samples = [sample for lesson in lessons for sample in lesson.samples]
    if not samples or any(sample.prompt.images or sample.images for sample in samples):
        return list(lessons)
    return PackedLessons(
        np.concatenate([ids for s in samples for ids in (s.prompt.ids, s.ids_T)]),
        np.concatenate([s.loss_mask_T for s in samples]),
        np.concatenate([s.turn_ends_T for s in samples]),
        [(len(s.prompt.ids), len(s.ids_T)) for s in samples],
        [(len(lesson.samples), lesson.num_replies) for lesson in lessons],
    )


class Lessons(Protocol):
    """An endless supply of lessons; the number of one says all about it."""

    def begin(self, first: int) -> None:
        """Prepare for lessons from number `first` on."""
        ...

    def lesson(self, index: int) -> Lesson: ...

    def close(self) -> None: ...


class OwnLessons:
    """Lessons that this process plays and renders when they are asked for."""

    def __init__(self, source: Source, renderer: ReplyRenderer, max_context: int) -> None:
        self._source, self._renderer, self._max_context = source, renderer, max_context

    def begin(self, first: int) -> None:
        """Nothing is made ahead."""

    def lesson(self, index: int) -> Lesson:
        dialogue = self._source.train(index)
        num_replies = sum(message.role == "assistant" for message in dialogue)
        return Lesson(encode(self._renderer, dialogue, self._max_context), num_replies)

    def close(self) -> None:
        """The source belongs to who opened it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one update learns from."""

    samples: list[Sample]
    next_index: int
    """The first dialogue that no update has seen yet."""
    num_dialogues: int
    num_cut: int
    """Dialogues that lost replies because they are longer than the context."""

    @property
    def num_tokens(self) -> int:
        return sum(map(_length, self.samples))


def next_batch(
    lessons: Lessons,
    first: int,
    *,
    batch_tokens: int,
    max_context: int,
    limit: int | None = None,
) -> Batch:
    """Dialogues from number `first` on, as many as fit into `batch_tokens`, at least one.

    `limit` is the longest context that the model was made for, if that is known.
    """
    samples: list[Sample] = []
    index, used, num_cut, num_skipped = first, 0, 0, 0
    while True:
        lesson = lessons.lesson(index)
        found = lesson.samples
        size = sum(map(_length, found))
        if samples and used + size > batch_tokens:
            break
        num_cut += lesson.is_cut
        num_skipped = 0 if found else num_skipped + 1
        if num_skipped == MOST_TOO_LONG:
            raise MooredError(
                f"not even the first reply of {MOST_TOO_LONG} dialogues in a row fits into "
                f"{about_context(max_context, limit)}"
            )
        samples += found
        used, index = used + size, index + 1
        if used >= batch_tokens:
            break
    return Batch(samples, index, index - first, num_cut)


def about_context(max_context: int, limit: int | None) -> str:
    """The context that is too short, and what to do: the model may not allow a longer one."""
    if limit is not None and max_context >= limit:
        return (
            f"max_context = {max_context} tokens, the most that the model was made for; choose "
            f"shorter dialogues, or another model"
        )
    most = "" if limit is None else f" (to {limit} at most)"
    return f"max_context = {max_context} tokens; raise it{most}, or choose shorter dialogues"


def encode(renderer: ReplyRenderer, dialogue: Sequence[Message], max_context: int) -> list[Sample]:
    """The dialogue up to the last reply that fits, as one sample; none when no reply fits.

    Where a template rewrites history there is one sample for each reply.
    """
    turns = list(_turns(renderer, dialogue, max_context))
    if not turns:
        return []
    trajectory = Trajectory(
        env="", task_seed=0, episode_seed=0, turns=tuple(turns), stop=StopReason.DONE
    )
    return build_samples([Group(group_id=0, env="", task_seed=0, trajectories=(trajectory,))])


def _turns(
    renderer: ReplyRenderer, dialogue: Sequence[Message], max_context: int
) -> Iterator[Turn]:
    prompt: Prompt | None = None
    for place, message in enumerate(dialogue):
        if message.role != "assistant":
            continue
        history = dialogue[:place]
        if prompt is None:
            prompt = renderer.start(history)
        ids = renderer.reply_ids(message.text)
        if len(prompt.ids) + len(ids) > max_context:
            return
        yield Turn(
            prompt=prompt, completion_ids=ids, logprobs=np.zeros(len(ids)), reply=message.text
        )
        if place + 1 < len(dialogue):
            observation = dialogue[place + 1].content
            prompt = renderer.extend(prompt, ids, message.text, observation, history)


def weighted(samples: Sequence[Sample]) -> list[LossSample]:
    """A minibatch in which every reply token counts the same, as `Learner.step` takes it."""
    weights = token_weights(samples, IMITATION.aggregation, max_length=1)
    ones = [TokenAdvantages(advantages_T=sample.loss_mask_T.astype(float)) for sample in samples]
    return loss_samples(samples, ones, weights, weights)


def _length(sample: Sample) -> int:
    return len(sample.prompt.ids) + len(sample.ids_T)
