"""Score every reasoning under every prompt, with whatever model the caller has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moored.diagnostics.pairs import PairSet
from moored.errors import MooredError
from moored.types import ScoreRequest


class ScoreFn(Protocol):
    """The model: for each request the log-probabilities of the tokens of its continuations.

    All requests come in one call, so that an implementation computes each prompt once and makes
    one round trip.
    """

    def __call__(self, requests: Sequence[ScoreRequest]) -> Sequence[Sequence[np.ndarray]]: ...


def cross_score(pairs: PairSet, score: ScoreFn) -> np.ndarray:
    """(M, N) log-likelihood of each reasoning under each prompt, summed over its tokens.

    Opening tags are conditioned on and not counted. Feed the result to `information` with
    `pairs.columns` and `pairs.lengths`.
    """
    continuations = [pair.continuation for pair in pairs.pairs]
    logp_MN = np.empty((len(continuations), len(pairs.prompts)))
    columns = score([ScoreRequest(prompt, continuations) for prompt in pairs.prompts])
    for j, scored in enumerate(columns):
        if [len(x) for x in scored] != [len(x) for x in continuations]:
            raise MooredError(
                f"the score function must return one log-probability per continuation token; for "
                f"prompt {j} it returned {[len(x) for x in scored]} values for "
                f"{[len(x) for x in continuations]} tokens"
            )
        for m, (pair, logp) in enumerate(zip(pairs.pairs, scored, strict=True)):
            logp_MN[m, j] = float(np.sum(logp[pair.num_opening :], dtype=np.float64))
    return logp_MN
