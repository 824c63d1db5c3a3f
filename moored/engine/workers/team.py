"""The seam between a driver and its workers: one method, called on every rank at once.

The driver runs the training loop and holds no weights. A worker (`RankWorker`) holds the shard of
one rank and a sampler. Which processes the workers are, and how calls reach them, is the team's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from moored.errors import MooredError


class WorkerLost(MooredError):
    """A worker that ended or no longer answers; the run goes on from its last checkpoint."""


class Team(Protocol):
    """Workers of ranks 0 to `size` - 1."""

    size: int

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, /, *args: Any
    ) -> list[Any]:
        """Run `worker.method(*per_rank[rank], *args)` on every rank at once; results by rank."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
