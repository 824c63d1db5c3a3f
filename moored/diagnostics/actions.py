"""I(X;A): does an agent act on what it sees, or the same whatever its task?

Action strings are counted, and what counting gives by chance is taken off: with few samples per
cell the plug-in estimate is mostly bias. Its mean over all dealings of the actions is known in
closed form, so neither the estimate nor its interval needs a draw.
Shape legend: S samples, B draws, O trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moored.diagnostics.chain import MIN_PROMPTS, Link, number_labels, with_tasks
from moored.diagnostics.report import Interval
from moored.diagnostics.resampling import MAX_ELEMENTS, check_draws, t_quantile
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReport(Link):
    """I(X;A): whether actions depend on the prompt at all. `mi_nats` is plug-in minus null."""

    mi_plugin_nats: float
    """From the observed counts; too high when there are few samples per cell."""
    mi_null_mean_nats: float
    """Its mean over all dealings of the actions among the prompts, turn number by turn number."""
    num_samples: int
    """Actions that were compared."""
    num_prompts: int
    num_distinct_actions: int
    share_left_out: float
    """Actions without another one of their prompt, or of another prompt, at their turn number."""


def action_information(
    prompts: Sequence[Hashable],
    actions: Sequence[Hashable],
    *,
    turns: Sequence[Hashable] | None = None,
    trajectories: Sequence[Hashable] | None = None,
    permutations: int = 0,
    seed: int = 0,
) -> ActionReport:
    """I(X;A | turn number) of action strings minus its null; `prompts[i]` had `actions[i]`.

    With n(x, a) actions a of prompt x at a turn number t, and phi(n) = n log n,

        I - E[I] = 1/S sum over t, x, a of ( phi(n(x, a)) - E[phi(n(x, a))] ),

    the expectation over all dealings of the actions of t among its prompts (hypergeometric).
    Draws for the p-value keep the actions of one of the `trajectories` together.
    """
    check_draws(permutations=permutations)
    if len(prompts) != len(actions):
        raise MooredError(f"one action per prompt, got {len(prompts)} and {len(actions)}")
    for name, labels in {"turns": turns, "trajectories": trajectories}.items():
        if labels is not None and len(labels) != len(actions):
            raise MooredError(f"{name} must name one per action, got {len(labels)}, {len(actions)}")
    x_S, a_S = number_labels(prompts), number_labels(actions)
    t_S = number_labels(turns or [0] * len(a_S))
    strata = _comparable(x_S, t_S)
    if not strata:
        raise TooFewPromptsError(
            f"I(X;A) needs at least 2 distinct prompts with 2 actions each at one turn number, got "
            f"{len(a_S)} actions of {len(set(prompts))} prompts"
        )
    kept = np.concatenate(strata)
    excess, plugin = _excess_nats(x_S, a_S, strata), _plugin_nats(x_S, a_S, strata)
    p_value = None
    if permutations:
        owner_S = number_labels(trajectories or range(len(a_S)))
        rng = np.random.default_rng(seed)
        p_value = _p_value(x_S, a_S, owner_S, strata, permutations, rng)
    return ActionReport(
        mi_nats=excess,
        mi_plugin_nats=plugin,
        mi_null_mean_nats=plugin - excess,
        interval=_jackknife_interval(excess, x_S, a_S, t_S),
        p_value=p_value,
        num_samples=len(kept),
        num_prompts=len(np.unique(x_S[kept])),
        num_distinct_actions=len(np.unique(a_S[kept])),
        share_left_out=1.0 - len(kept) / len(a_S),
    )


def _comparable(x_S: np.ndarray, t_S: np.ndarray, without: int = -1) -> list[np.ndarray]:
    """Samples of each turn number of which two prompts have two each; one prompt left out."""
    strata = []
    for t in np.unique(t_S):
        rows = np.flatnonzero((t_S == t) & (x_S != without))
        found, counts = np.unique(x_S[rows], return_counts=True)
        repeated = found[counts > 1]
        if len(repeated) > 1:
            strata.append(rows[np.isin(x_S[rows], repeated)])
    return strata


def _excess_nats(x_S: np.ndarray, a_S: np.ndarray, strata: Sequence[np.ndarray]) -> float:
    """Plug-in estimate minus its mean over all dealings."""
    total = 0.0
    for rows in strata:
        total += _phi(_counts(_cells(x_S[rows], a_S[rows]))).sum()
        sizes, counts = (
            zip(*map(np.ndarray.tolist, np.unique(_counts(codes), return_counts=True)), strict=True)
            for codes in (x_S[rows], a_S[rows])
        )
        counts = list(counts)
        total -= sum(
            num_prompts * num_actions * _expected_phi(len(rows), size, count)
            for size, num_prompts in sizes
            for count, num_actions in counts
        )
    # What rounding leaves of equal sums is no dependence.
    return round(float(total) / sum(map(len, strata)), 12) + 0.0


@lru_cache(maxsize=1 << 14)
def _expected_phi(total: int, size: int, count: int) -> float:
    """E[n log n], n being how many of `count` actions fall to `size` samples of `total`."""
    n = np.arange(max(2, size + count - total), min(size, count) + 1)
    logf = _log_factorials(total)
    log_p = (
        (logf[size] - logf[n] - logf[size - n])
        + (logf[total - size] - logf[count - n] - logf[total - size - count + n])
        - (logf[total] - logf[count] - logf[total - count])
    )
    return float((np.exp(log_p) * _phi(n)).sum())


@lru_cache(maxsize=64)
def _log_factorials(most: int) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


def _cells(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    return x * (int(a.max()) + 1) + a


def _counts(codes: np.ndarray) -> np.ndarray:
    return np.unique(codes, return_counts=True)[1]


def _phi(counts: np.ndarray) -> np.ndarray:
    return counts * np.log(counts)


def _plugin_nats(x_S: np.ndarray, a_S: np.ndarray, strata: Sequence[np.ndarray]) -> float:
    """H(X) + H(A) - H(X,A) of the counts of each turn number, averaged over samples."""
    total = 0.0
    for rows in strata:
        x, a, num = x_S[rows], a_S[rows], len(rows)
        joint, of_x, of_a = (_phi(_counts(codes)).sum() for codes in (_cells(x, a), x, a))
        total += joint - of_x - of_a + num * math.log(num)
    return max(float(total) / sum(map(len, strata)), 0.0)


def _jackknife_interval(
    excess: float, x_S: np.ndarray, a_S: np.ndarray, t_S: np.ndarray
) -> Interval | None:
    """From the estimates without each prompt, every one minus a null of its own.

    A bootstrap would draw prompts twice, and count their actions as coincidences. The mean of the
    estimate is not below 0, so neither is the upper end.
    """
    rest = [_comparable(x_S, t_S, without=x) for x in np.unique(x_S).tolist()]
    without = [_excess_nats(x_S, a_S, strata) for strata in rest if strata]
    count = len(without)
    if count < MIN_PROMPTS:
        return None
    half = t_quantile(count - 1) * math.sqrt((count - 1) * float(np.var(without)))
    return Interval(excess - half, max(excess + half, 0.0))


def _p_value(
    x_S: np.ndarray,
    a_S: np.ndarray,
    owner_S: np.ndarray,
    strata: Sequence[np.ndarray],
    draws: int,
    rng: np.random.Generator,
) -> float:
    """Chance of as many coincidences when trajectories are dealt to prompts at random.

    One random order of trajectories serves all turn numbers of a draw: those that got to a turn
    are dealt to its prompts in that order, so the turns of a trajectory mostly stay together.
    """
    num_owners, width = int(owner_S.max()) + 1, int(a_S.max()) + 1
    num_cells = (int(x_S.max()) + 1) * width
    observed = sum(_phi(_counts(x_S[rows] * width + a_S[rows])).sum() for rows in strata)
    num_as_large = 1
    block = max(1, MAX_ELEMENTS // len(x_S))
    for first in range(0, draws, block):
        size = min(block, draws - first)
        rank_BO = rng.permuted(np.tile(np.arange(num_owners), (size, 1)), axis=1)
        null_B = np.zeros(size)
        for rows in strata:
            dealt = np.argsort(rank_BO[:, owner_S[rows]], axis=1)
            cells = x_S[rows] * width + a_S[rows][dealt]
            cells += num_cells * np.arange(size)[:, None]
            found, counts = np.unique(cells, return_counts=True)
            null_B += np.bincount(found // num_cells, weights=_phi(counts), minlength=size)
        num_as_large += int(np.count_nonzero(null_B >= observed - 1e-9 * (1.0 + observed)))
    return num_as_large / (draws + 1)


def state_action(groups: Sequence[Group], *, permutations: int = 0, seed: int = 0) -> ActionReport:
    """I(X;A) of all turns that hold an action; X is the task, told by its first prompt.

    The dialogue before a later turn belongs to one trajectory alone. What the task says about an
    action is at most what the dialogue does, and is 0 for a policy that only copies itself.
    """
    rows = [
        (task, tuple(turn.ended_action_ids.tolist()), t, (number, member))
        for number, (task, group) in enumerate(with_tasks(groups))
        for member, trajectory in enumerate(group.trajectories)
        for t, turn in enumerate(trajectory.turns)
        if len(turn.action_ids)
    ]
    tasks, actions, turns, owners = zip(*rows, strict=True) if rows else [()] * 4
    return action_information(
        tasks, actions, turns=turns, trajectories=owners, permutations=permutations, seed=seed
    )
