"""The learner of a driver: every rank of a team computes its part of each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from moored.engine.workers.split import deal, gather, split_by_tokens, split_requests
from moored.engine.workers.team import Team
from moored.errors import MooredError
from moored.training.samples import LossSample, Sample
from moored.types import ScoreRequest


class TeamLearner:
    """Scores and updates by the workers of a team; weights stay with them.

    An update is the same as in one process: ranks get whole samples with weights that are shares of
    the whole update, and add up gradients and figures.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        ranks = split_requests(requests, self._team.size)
        parts = deal(requests, ranks, self._team.size)
        return gather(self._team.call("score", [(part,) for part in parts]), ranks)

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        ranks = self._ranks_of(samples)
        parts = deal(samples, ranks, self._team.size)
        return gather(self._team.call("values", [(part,) for part in parts]), ranks)

    def damaged_weights(self) -> list[str]:
        return sorted({name for names in self._team.call("damaged_weights") for name in names})

    def step(
        self, minibatches: Iterable[Sequence[LossSample]], *, lr_factor: float = 1.0
    ) -> Iterator[Mapping[str, float]]:
        """All updates in one call; workers stop after one whose figures are not finite."""
        dealt = [self._deal_update(samples) for samples in minibatches]
        per_rank = [([parts[rank] for parts in dealt],) for rank in range(self._team.size)]
        stats, self._version = self._team.call("step", per_rank, lr_factor)[0]
        yield from stats

    def _deal_update(self, samples: Sequence[LossSample]) -> list[list[LossSample]]:
        if not samples:
            raise MooredError("an update needs at least one sample")
        ranks = self._ranks_of([given.sample for given in samples])
        return deal(samples, ranks, self._team.size)

    def _ranks_of(self, samples: Sequence[Sample]) -> list[int]:
        prompts, lengths = [s.prompt for s in samples], [len(s.ids_T) for s in samples]
        return split_by_tokens(prompts, lengths, self._team.size)

    def save(self, folder: Path) -> None:
        self._team.call("save", None, folder)

    def load(self, folder: Path, *, policy_only: bool = False) -> None:
        self._version = self._team.call("load", None, folder, policy_only)[0]
