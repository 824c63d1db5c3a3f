"""Who computes what: samples, requests and groups dealt out among ranks, none dropped or doubled.

Costs are tokens. What shares a prompt tends to stay together, because a rank computes a prompt
once; but no rank waits for another that has much more to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from moored.types import Prompt, ScoreRequest

T = TypeVar("T")


def split_by_tokens(prompts: Sequence[Prompt], lengths: Sequence[int], size: int) -> list[int]:
    """The rank of each continuation: the longest first, to where it ends earliest."""
    loads = [0] * size
    known: list[set[bytes]] = [set() for _ in range(size)]
    ranks = [0] * len(lengths)
    costs = [length + len(prompt.ids) for prompt, length in zip(prompts, lengths, strict=True)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        key = prompts[index].key
        after = [
            loads[rank] + (lengths[index] if key in known[rank] else costs[index])
            for rank in range(size)
        ]
        rank = min(range(size), key=lambda r: (after[r], r))
        loads[rank], ranks[index] = after[rank], rank
        known[rank].add(key)
    return ranks


def split_requests(requests: Sequence[ScoreRequest], size: int) -> list[int]:
    """The rank of each request; its continuations stay together."""
    lengths = [sum(map(len, request.continuations)) for request in requests]
    return split_by_tokens([request.prompt for request in requests], lengths, size)


def deal(items: Sequence[T], ranks: Sequence[int], size: int) -> list[list[T]]:
    """The items of each rank, in order."""
    dealt: list[list[T]] = [[] for _ in range(size)]
    for item, rank in zip(items, ranks, strict=True):
        dealt[rank].append(item)
    return dealt


def gather(results: Sequence[Sequence[T]], ranks: Sequence[int]) -> list[T]:
    """The results of all ranks, in the order of the items that were dealt."""
    each = [iter(found) for found in results]
    return [next(each[rank]) for rank in ranks]
