"""Rewards as updates use them: those of the environment, less what an overlong reply costs."""

from __future__ import annotations

import math

import numpy as np

from moored.config import Config
from moored.types import Group, Turn


def shaped_reward(config: Config, turn: Turn) -> float:
    """The reward of a turn, less the penalty for an overlong reply."""
    longest, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    return turn.reward + overlong_penalty(len(turn.completion_ids), longest, buffer)


def shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """(G,) shaped rewards of the trajectories; NaN where one ended in an error."""
    return np.array(
        [
            math.nan if t.stop.is_error else math.fsum(shaped_reward(config, x) for x in t.turns)
            for t in group.trajectories
        ]
    )


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to max - buffer, then linearly down to -1 at max."""
    if buffer <= 0:
        return 0.0
    return float(np.clip((max_length - buffer - length) / buffer, -1.0, 0.0))
