"""From drawn tokens to completions, and what a session holds then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moored.engine.base import Request, SamplingParams, check_params
from moored.engine.fast.rows import MAX_STOPS
from moored.engine.fast.slots import Session
from moored.errors import MooredError
from moored.types import Completion, FinishReason


def check_fast_params(params: SamplingParams) -> None:
    """Raise for what cannot be drawn on the device."""
    check_params(params)
    if len(params.stop_ids) > MAX_STOPS:
        raise MooredError(f"at most {MAX_STOPS} stop tokens, got {len(params.stop_ids)}")


def reply_lengths(tokens: np.ndarray, params: SamplingParams) -> list[int]:
    """Tokens of each reply of `tokens` (rows, max_tokens): up to the first stop, or all."""
    is_stop = np.isin(tokens, np.array(params.stop_ids, dtype=np.int64))
    lengths = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, params.max_tokens)
    return lengths.tolist()


def make_completions(
    tokens: np.ndarray,
    logps: np.ndarray,
    lengths: Sequence[int],
    rows: Sequence[tuple[Request, Session]],
    params: SamplingParams,
    version: int,
) -> list[Completion]:
    """One completion for each row of `tokens` and `logps`; sessions then hold the replies too."""
    tokens, logps = tokens.astype(np.int64), logps.copy()
    is_reply = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    if not np.isfinite(logps, out=np.ones(logps.shape, dtype=bool), where=is_reply).all():
        raise MooredError(
            "the model's log-probabilities are not finite: its weights are damaged; go back to "
            "an earlier checkpoint"
        )
    stops = frozenset(params.stop_ids)
    completions = []
    for row, ((request, session), length) in enumerate(zip(rows, lengths, strict=True)):
        ids = tokens[row, :length]
        # The last token was drawn, but not yet run through the model.
        session.ids = np.concatenate([request.prompt.ids, ids[:-1]])
        is_stopped = int(ids[-1]) in stops
        completions.append(
            Completion(
                token_ids=ids,
                logprobs=logps[row, :length],
                finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
                policy_version=version,
            )
        )
    return completions
