"""Prompts and completions of any trainer, as token ids, turned into the groups a monitor measures.

Numpy only. A tokenizer comes in as its `decode` function.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from moored.errors import MooredError
from moored.reply import THINK_TAGS, Tags, ends_open, find_think
from moored.types import Group, Prompt, Span, StopReason, Trajectory, Turn

TokenIds = Sequence[int] | np.ndarray
Decode = Callable[[list[int]], str]


def think_span(
    completion_ids: TokenIds,
    decode: Decode,
    tags: Tags = THINK_TAGS,
    *,
    is_open: bool = False,
) -> Span | None:
    """Tokens between the first opening tag and the next closing one; None where one is missing.

    `is_open` says that the prompt ends with the opening tag. A token that holds both a part of a
    tag and inner text belongs to the tag. `decode` must keep special tokens.
    """
    ids = [int(token) for token in completion_ids]
    text = decode(ids)
    chars = find_think(text, tags, is_open=is_open)
    if chars is None:
        return None
    first, last = chars

    def num_chars(num_tokens: int) -> int:
        return len(decode(ids[:num_tokens]))

    counts = range(len(ids) + 1)
    start = bisect_left(counts, first, key=num_chars)
    stop = bisect_left(counts, last + 1, key=num_chars) - 1
    return start, max(start, stop)


def reasoning_after(
    context: list[int], reply: list[int], decode: Decode | None, tags: Tags | None
) -> Span | None:
    """Where the reasoning of a reply to `context` lies; `tags=None` takes the whole reply."""
    if tags is None:
        return 0, len(reply)
    if decode is None:
        raise MooredError(
            "finding the reasoning by its tags needs `decode`, the tokenizer's; give it, record "
            "spans in the agent loop, or take whole replies with tags=None"
        )
    is_open = ends_open(decode(context[-2 * len(tags[0]) :]), tags)
    return think_span(reply, decode, tags, is_open=is_open)


def group_completions(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds],
    think_spans: Sequence[Span | None] | None = None,
) -> list[Group]:
    """One group per distinct prompt, in order of first appearance.

    Without `think_spans` the whole completion counts as reasoning.
    """
    spans = [(0, len(ids)) for ids in completions] if think_spans is None else think_spans
    if not len(prompts) == len(completions) == len(spans):
        raise MooredError(
            f"give one prompt, one completion and one span for each row, got {len(prompts)}, "
            f"{len(completions)} and {len(spans)}"
        )
    text = next((row for row in (*prompts, *completions) if isinstance(row, str)), None)
    if text is not None:
        raise MooredError(f"prompts and completions are token ids, got {text!r:.80}; encode texts")
    turns = [make_turn(*row) for row in zip(prompts, completions, spans, strict=True)]
    return group_episodes("completions", [(turn.prompt, (turn,)) for turn in turns])


def make_turn(
    prompt: TokenIds,
    completion: TokenIds,
    span: Span | None,
    observation_start: int | None = None,
) -> Turn:
    """A turn of which only ids and reasoning are known, and where its newest observation begins."""
    return Turn(
        prompt=Prompt(np.asarray(prompt, dtype=np.int64)),
        completion_ids=np.asarray(completion, dtype=np.int64),
        logprobs=np.full(len(completion), np.nan),
        think_span=span,
        reply="",
        observation_start=observation_start,
    )


def group_episodes(
    env: str, episodes: Iterable[tuple[Prompt, tuple[Turn, ...]]], *, first_id: int = 0
) -> list[Group]:
    """One group per distinct first prompt, in order of first appearance, with ids from `first_id`.

    Groups that are measured together need different ids: equal ones count as one task.
    """
    by_prompt: dict[Prompt, list[tuple[Turn, ...]]] = {}
    for prompt, turns in episodes:
        by_prompt.setdefault(prompt, []).append(turns)
    return [
        _group(env, index, members) for index, members in enumerate(by_prompt.values(), first_id)
    ]


def _group(env: str, index: int, members: Sequence[tuple[Turn, ...]]) -> Group:
    trajectories = tuple(
        Trajectory(env=env, task_seed=index, episode_seed=k, turns=turns, stop=StopReason.DONE)
        for k, turns in enumerate(members)
    )
    return Group(group_id=index, env=env, task_seed=index, trajectories=trajectories)
