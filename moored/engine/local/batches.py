"""How many tokens a pass over a micro-batch has."""

from __future__ import annotations

MICRO_BATCH_TOKENS = (4096, 24576)
"""On a CPU, where activations should stay near the cores; on a GPU."""
FORWARD_TIMES = 4
"""Passes without gradients keep no activations: on a GPU they have this many times the tokens, up
to the size above, or to this many times that size for models small enough to be recorded."""


def default_tokens(device: str) -> int:
    """Where `engine.micro_batch_tokens` says nothing, on a kind of device."""
    return MICRO_BATCH_TOKENS[device != "cpu"]


def forward_tokens(most: int, device: str, *, can_record: bool) -> int:
    """Most tokens of a pass without gradients that is not recorded; others have `most`."""
    if device != "cuda":
        return most
    bound = default_tokens(device) * (FORWARD_TIMES if can_record else 1)
    return max(most, min(FORWARD_TIMES * most, bound))
