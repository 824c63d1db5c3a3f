"""What ranks of a learner hold whole during an update, although they share it out otherwise.

A small model is bound by the host, which FSDP2 keeps busy with every layer and every micro-batch.
With whole weights and gradients a rank gathers once and sums over ranks once for each update.
`moored plan` goes by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_SHARE = 0.1
"""Of a GPU's memory, for what is whole: larger micro-batches are the better use of more. The host
does not bound models for which that is too little."""
SUM_BYTES = 4
"""Of a gradient: micro-batches are added up in float32."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What is whole on every rank from the first micro-batch of an update to the last."""

    weights: bool
    """Gathered once; only where gradients are whole as well."""
    gradients: bool
    """Added up on each rank, and over ranks with the last micro-batch only."""


def held_whole(
    parameters: int, trained: int, memory_bytes: float, *, element_bytes: int = 2
) -> Whole:
    """By the sizes of policy and critic together, and the memory of the rank that has least.

    Whole weights are summed as one piece, so beside the gradients there is a copy of them in the
    order of ranks.
    """
    room = WHOLE_SHARE * memory_bytes
    return Whole(
        weights=element_bytes * parameters + 2 * SUM_BYTES * trained <= room,
        gradients=SUM_BYTES * trained <= room,
    )
