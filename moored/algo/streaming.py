"""`top_p` for trainers that hand over one group at a time and want an answer at once.

Batch `top_p` sorts a batch and keeps the best groups until they hold `value` of its score. A stream
has no batch, so the last `window` groups stand in for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.filters import select
from moored.algo.groups import ROUNDING, group, group_scores, load_score, moments
from moored.errors import MooredError
from moored.names import check_rule_value


class StreamingFilter:
    """Keep or drop each group as it comes, so that the kept share of the score stays near `value`.

    The cut is the smallest score that `top_p` keeps in the window, the new group included. Above it
    a group is kept, below it dropped. At the cut (rewards of 0 and 1 give few distinct variances,
    so that is common) it is kept while the window holds less than `value` in kept groups.
    """

    def __init__(
        self,
        value: float = 0.9,
        *,
        score: str = "variance",
        ddof: int = 0,
        window: int = 64,
        warmup: int = 8,
    ) -> None:
        check_rule_value("top_p", value)
        load_score(score)
        if window < 1 or warmup < 0:
            raise MooredError(f"window must be >= 1 and warmup >= 0, got {window} and {warmup}")
        self.value = value
        self.score = score
        self.ddof = ddof
        self.warmup = warmup
        """Groups before the first cut; until then every score except zero is kept."""
        # The window without the group that is being decided.
        self._scores: deque[float] = deque(maxlen=window - 1)
        self._is_kept: deque[bool] = deque(maxlen=window - 1)
        self._num_seen = 0

    def offer(self, rewards: ArrayLike) -> bool:
        """Take in the rewards of the next group (NaN for failed rollouts); True to train on it."""
        row = np.asarray(rewards)
        if row.ndim != 1:
            raise MooredError(
                f"offer takes the rewards of one group, a flat list, got shape {row.shape}"
            )
        scores = group_scores(moments(group(row[None])), score=self.score, ddof=self.ddof)
        return self.offer_score(float(scores[0]))

    def offer_score(self, score: float) -> bool:
        """The same for a group that is scored already."""
        score = float(score)
        if not (math.isfinite(score) and score >= 0.0):
            raise MooredError(f"a streamed score must be finite and >= 0, got {score}")
        is_kept = self._keeps(score)
        self._scores.append(score)
        self._is_kept.append(is_kept)
        self._num_seen += 1
        return is_kept

    def _keeps(self, score: float) -> bool:
        if score == 0.0 or self._num_seen < self.warmup:
            return score > 0.0
        recent = np.array([*self._scores, score])
        kept = select(recent, rule="top_p", value=self.value)
        if len(kept) == 0:
            return False
        cut = float(recent[kept].min())
        if abs(score - cut) > ROUNDING * cut:
            return score > cut
        kept_mass = sum(
            s for s, was_kept in zip(self._scores, self._is_kept, strict=True) if was_kept
        )
        return kept_mass < self.value * float(recent.sum()) * (1.0 - ROUNDING)

    def state_dict(self) -> dict[str, object]:
        """The window and its decisions, as plain lists."""
        return {
            "scores": list(self._scores),
            "is_kept": list(self._is_kept),
            "num_seen": self._num_seen,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where `state_dict` was taken; a smaller window keeps the newest groups."""
        scores, is_kept, num_seen = state["scores"], state["is_kept"], state["num_seen"]
        assert isinstance(scores, list) and isinstance(is_kept, list) and isinstance(num_seen, int)
        self._scores = deque(scores, maxlen=self._scores.maxlen)
        self._is_kept = deque(is_kept, maxlen=self._is_kept.maxlen)
        self._num_seen = num_seen
