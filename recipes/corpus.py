"""Demonstrations as token ids: dialogues are made and encoded in parallel, the order is fixed.

The result is three flat arrays, small enough to lie on the training device as a whole.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

from moored.types import Message
from recipes.demonstrations import MIX, TaskSpec, make_dialogue
from recipes.tokenizer import END, START

CHUNK = 250


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Dialogues end to end."""

    ids: np.ndarray
    """(tokens,) uint16."""
    is_target: np.ndarray
    """(tokens,) True for tokens of replies, their end token included."""
    lengths: np.ndarray
    """(dialogues,) tokens of each dialogue."""

    @classmethod
    def join(cls, parts: Iterable[Corpus]) -> Corpus:
        fields = zip(*((part.ids, part.is_target, part.lengths) for part in parts), strict=True)
        return cls(*(np.concatenate(arrays) for arrays in fields))


class Encoder:
    """Writes dialogues as the chat template does, and marks what is to be learnt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = lru_cache(maxsize=4096)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        )

    def encode(self, messages: Iterable[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of a dialogue, and which of them the model writes."""
        ids: list[int] = []
        is_target: list[bool] = []
        for message in messages:
            head = self._encode(f"{START}{message.role}\n")
            body = self._encode(message.text + END)
            tail = self._encode("\n")
            ids += [*head, *body, *tail]
            is_reply = message.role == "assistant"
            is_target += [False] * len(head) + [is_reply] * len(body) + [False] * len(tail)
        return ids, is_target


def make_corpus(
    tokenizer: Tokenizer,
    num_dialogues: int,
    seed: int,
    *,
    mix: tuple[TaskSpec, ...] = MIX,
    num_workers: int | None = None,
) -> Corpus:
    """Make and encode the first dialogues of a seed; the result is the same for any workers."""
    num_workers = num_workers or os.cpu_count() or 1
    starts = range(0, num_dialogues, CHUNK)
    jobs = [(seed, start, min(start + CHUNK, num_dialogues)) for start in starts]
    shared = (tokenizer.to_str(), mix)
    if num_workers == 1:
        _set_up(*shared)
        return Corpus.join(map(_make_chunk, jobs))
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_workers, _set_up, shared) as pool:
        return Corpus.join(pool.imap(_make_chunk, jobs))


_worker: dict[str, object] = {}


def _set_up(tokenizer: str, mix: tuple[TaskSpec, ...]) -> None:
    """What a worker needs for all its chunks."""
    _worker.update(encoder=Encoder(Tokenizer.from_str(tokenizer)), mix=mix)


def _make_chunk(job: tuple[int, int, int]) -> Corpus:
    encoder, mix = _worker["encoder"], _worker["mix"]
    assert isinstance(encoder, Encoder) and isinstance(mix, tuple)
    seed, start, stop = job
    coded = [
        encoder.encode(make_dialogue(seed, index, mix).messages) for index in range(start, stop)
    ]
    return Corpus(
        ids=np.concatenate([np.array(ids, dtype=np.uint16) for ids, _ in coded]),
        is_target=np.concatenate([np.array(is_target) for _, is_target in coded]),
        lengths=np.array([len(ids) for ids, _ in coded]),
    )
