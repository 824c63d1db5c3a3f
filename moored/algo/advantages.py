"""Advantage estimators: rewards in, advantages out, all numpy.

The group estimators (`grpo`, `dr_grpo`, `rloo`) take one reward per trajectory, (P, G) or flat with
`group_ids`, and return one advantage per trajectory in the same shape; a NaN reward takes no part
and gets advantage 0. The others work on tokens, with a critic (`gae`, `bilevel_gae`) or without one
(`reinforce_pp`).
Shape legend: B rows, T tokens, S tokens inside the mask, P groups, G trajectories.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.groups import GroupIds, group, moments, rounding_of
from moored.errors import MooredError


class Advantages(NamedTuple):
    """Unpacks as `advantages, returns = gae(...)`; both (B, T), zero outside the mask."""

    advantages: np.ndarray
    returns: np.ndarray


def grpo(
    rewards: ArrayLike, group_ids: GroupIds | None = None, *, ddof: int = 0, eps: float = 1e-6
) -> np.ndarray:
    """GRPO: (R - mean) / (std + eps) inside each group. TRL and verl use ddof=1."""
    grouped = group(rewards, group_ids)
    stats = moments(grouped)
    scale_P = np.sqrt(stats.variance(ddof)) + eps
    return grouped.ungroup(stats.deviation_PG / scale_P[:, None])


def dr_grpo(rewards: ArrayLike, group_ids: GroupIds | None = None) -> np.ndarray:
    """Dr. GRPO: R - mean. No std: it over-weights too-easy and too-hard prompts (2503.20783)."""
    grouped = group(rewards, group_ids)
    return grouped.ungroup(moments(grouped).deviation_PG)


def rloo(rewards: ArrayLike, group_ids: GroupIds | None = None) -> np.ndarray:
    """RLOO: R - mean of the *other* rewards of the group; 0 for a trajectory without others."""
    grouped = group(rewards, group_ids)
    stats = moments(grouped)
    # R - mean of the n - 1 others = (R - mean of all n) * n / (n - 1)
    correction_P = stats.count_P / np.maximum(stats.count_P - 1, 1)
    return grouped.ungroup(stats.deviation_PG * correction_P[:, None])


def reinforce_pp(
    rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0, *, eps: float = 1e-8
) -> np.ndarray:
    """REINFORCE++: rewards to go of each sampled token, whitened over all of them; (B, T).

    A token's return is r_t + gamma r_next + …, over the tokens inside the mask.
    """
    mask_BT = np.asarray(mask).astype(bool)
    returns_BT = gae(rewards, np.zeros(mask_BT.shape), mask_BT, gamma).returns
    return whiten(returns_BT, mask_BT, eps=eps)


def whiten(x: ArrayLike, mask: ArrayLike | None = None, *, eps: float = 1e-8) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) over the entries where `mask` is set, 0 elsewhere.

    Entries that are equal up to rounding become exactly 0.
    """
    given = np.asarray(x)
    values = given.astype(np.float64, copy=False)
    chosen = np.ones(values.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if chosen.shape != values.shape:
        raise MooredError(f"x and mask must have one shape, got {values.shape} and {chosen.shape}")
    if not chosen.any():
        return np.zeros(values.shape)
    inside = values[chosen]
    centred = inside - inside.mean()
    out = np.zeros(values.shape)
    if not np.abs(centred).max() <= rounding_of(given) * np.abs(inside).max():
        out[chosen] = centred / np.sqrt(inside.var() + eps)
    return out


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    bootstrap: ArrayLike | None = None,
) -> Advantages:
    """Generalised advantage estimation over the sampled tokens of each row.

    delta_t = r_t + gamma V_next - V_t,  A_t = delta_t + gamma lam A_next,
    where `next` is the next token *inside the mask*: observation tokens are skipped, whatever
    their values. The value after the last sampled token is `bootstrap`, (B,): the critic's for an
    episode that was cut off, 0 for one that ended. None: all ended.
    """
    rewards_BT, values_BT, mask_BT = _token_arrays(rewards, values, mask)
    no_cut_BT = np.zeros(mask_BT.shape, dtype=bool)
    last_B = _last_values(bootstrap, len(mask_BT))
    return _backward_pass(rewards_BT, values_BT, mask_BT, no_cut_BT, last_B, gamma, lam)


def bilevel_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    turn_ends: ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    gamma_turn: float = 0.95,
    lam_turn: float = 1.0,
    *,
    bootstrap: ArrayLike | None = None,
) -> Advantages:
    """Bi-level GAE: over turns first, then over the tokens of each turn.

    `turn_ends` marks the last sampled token of every turn, whether or not the turn earned
    anything. Turn level: GAE over these tokens alone with `gamma_turn`; its return replaces the
    reward at the turn's end. Token level: GAE inside each turn, nothing flows across turns.
    `bootstrap` is the value after the last turn, as in `gae`.
    """
    rewards_BT, values_BT, mask_BT = _token_arrays(rewards, values, mask)
    ends_BT = np.asarray(turn_ends).astype(bool)
    if ends_BT.shape != mask_BT.shape:
        raise MooredError(f"turn_ends must be {mask_BT.shape} like mask, got {ends_BT.shape}")
    _check_turn_ends(ends_BT, mask_BT)
    no_cut_BT = np.zeros(mask_BT.shape, dtype=bool)
    last_B = _last_values(bootstrap, len(mask_BT))
    turns = _backward_pass(rewards_BT, values_BT, ends_BT, no_cut_BT, last_B, gamma_turn, lam_turn)
    rewards_BT = np.where(ends_BT, turns.returns, rewards_BT)
    # The return of the last turn has the bootstrap in it already, and the cut keeps it out here.
    return _backward_pass(rewards_BT, values_BT, mask_BT, ends_BT, last_B, gamma, lam)


def _backward_pass(
    rewards_BT: np.ndarray,
    values_BT: np.ndarray,
    mask_BT: np.ndarray,
    cut_BT: np.ndarray,
    last_B: np.ndarray,
    gamma: float,
    lam: float,
) -> Advantages:
    """GAE from right to left; where `cut_BT` is set nothing is taken over from the right."""
    # Only tokens inside the mask count, often a quarter of all: they are moved to the front.
    num_steps = int(mask_BT.sum(axis=1).max(initial=0))
    order_BS = np.argsort(~mask_BT, axis=1, kind="stable")[:, :num_steps]
    rewards_SB, values_SB, inside_SB, keep_SB = (
        np.ascontiguousarray(np.take_along_axis(x, order_BS, axis=1).T)
        for x in (rewards_BT, values_BT, mask_BT, ~cut_BT)
    )
    # Rows with fewer tokens than others have zeros behind their last one, and its next is `last_B`.
    next_SB = np.vstack([np.where(inside_SB, values_SB, last_B)[1:], last_B])
    delta_SB = rewards_SB + gamma * next_SB * keep_SB - values_SB
    factor_SB = gamma * lam * (inside_SB & keep_SB)
    advantages_SB = np.where(inside_SB, delta_SB, 0.0)
    following_B = np.zeros(len(mask_BT))
    for s in reversed(range(num_steps)):
        advantages_SB[s] += factor_SB[s] * following_B
        following_B = advantages_SB[s]
    advantages_BT = np.zeros(mask_BT.shape)
    np.put_along_axis(advantages_BT, order_BS, advantages_SB.T, axis=1)
    return Advantages(advantages_BT, np.where(mask_BT, advantages_BT + values_BT, 0.0))


def _token_arrays(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mask_BT = np.asarray(mask).astype(bool)
    arrays = [np.asarray(a, dtype=np.float64) for a in (rewards, values)]
    shapes = [a.shape for a in (*arrays, mask_BT)]
    if mask_BT.ndim != 2 or len(set(shapes)) != 1:
        raise MooredError(f"rewards, values and mask must share one (B, T) shape, got {shapes}")
    # Values outside the mask are ignored, even a NaN.
    rewards_BT, values_BT = (np.where(mask_BT, a, 0.0) for a in arrays)
    return rewards_BT, values_BT, mask_BT


def _last_values(bootstrap: ArrayLike | None, num_rows: int) -> np.ndarray:
    """(B,) value after the last sampled token of each row."""
    last_B = np.zeros(num_rows) if bootstrap is None else np.asarray(bootstrap, dtype=np.float64)
    if last_B.shape != (num_rows,):
        raise MooredError(f"bootstrap must have one value per row, {num_rows}, got {last_B.shape}")
    return last_B


def _check_turn_ends(ends_BT: np.ndarray, mask_BT: np.ndarray) -> None:
    if (ends_BT & ~mask_BT).any():
        row, token = np.argwhere(ends_BT & ~mask_BT)[0]
        raise MooredError(
            f"turn_ends marks token {token} of row {row}, which is not a sampled token; mark the "
            f"last sampled token of each turn"
        )
    ends_after_BT = np.cumsum(ends_BT[:, ::-1], axis=1)[:, ::-1]
    if (mask_BT & (ends_after_BT == 0)).any():
        row = int(np.argwhere(mask_BT & (ends_after_BT == 0))[0][0])
        raise MooredError(
            f"row {row} has sampled tokens after its last turn end; mark the last sampled token "
            f"of each turn in turn_ends"
        )
