"""Filters, advantages and signal-to-noise maths: numpy arrays in, numpy arrays out."""

from moored.algo.advantages import bilevel_gae, dr_grpo, gae, grpo, reinforce_pp, rloo, whiten
from moored.algo.causes import triage
from moored.algo.filters import (
    check_filter,
    loss_scale,
    preset,
    select,
    select_groups,
    select_trajectories,
)
from moored.algo.snr import advise, outcome_free_share, reward_variance
from moored.algo.streaming import StreamingFilter
from moored.types import Selection

__all__ = [
    "Selection",
    "StreamingFilter",
    "advise",
    "bilevel_gae",
    "check_filter",
    "dr_grpo",
    "gae",
    "grpo",
    "loss_scale",
    "outcome_free_share",
    "preset",
    "reinforce_pp",
    "reward_variance",
    "rloo",
    "select",
    "select_groups",
    "select_trajectories",
    "triage",
    "whiten",
]
