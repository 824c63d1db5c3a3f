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
from moored.algo.objectives import (
    aggregate,
    clip_loss,
    kl_estimate,
    lr_factor,
    sequence_logp,
    token_shares,
    value_loss,
)
from moored.algo.snr import advise, outcome_free_share, reward_variance
from moored.algo.streaming import StreamingFilter
from moored.types import Selection

__all__ = [
    "Selection",
    "StreamingFilter",
    "advise",
    "aggregate",
    "bilevel_gae",
    "check_filter",
    "clip_loss",
    "dr_grpo",
    "gae",
    "grpo",
    "kl_estimate",
    "loss_scale",
    "lr_factor",
    "outcome_free_share",
    "preset",
    "reinforce_pp",
    "reward_variance",
    "rloo",
    "select",
    "select_groups",
    "select_trajectories",
    "sequence_logp",
    "token_shares",
    "triage",
    "value_loss",
    "whiten",
]
