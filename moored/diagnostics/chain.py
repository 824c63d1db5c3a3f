"""The rest of the chain X -> Z -> A: does reasoning control action, and does action see the state?

`reasoning_action_information` estimates I(Z;A|X) from K x K scores per prompt;
`action_information` estimates I(X;A) by counting action strings. `reasoning_action` and
`state_action` apply them to the first turns of recorded groups.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.diagnostics.information import Likelihood
from moored.diagnostics.pairs import ScoreFn
from moored.diagnostics.report import Interval
from moored.diagnostics.resampling import check_draws
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group, Prompt, ScoreRequest, Turn

MIN_PROMPTS = 3
"""For an interval: draws from two reach from the one to the other, which holds the mean of all
prompts half of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningActionReport:
    """I(Z;A|X): how much the reasoning of a trajectory says about its own action."""

    mi_nats: float
    mi_upper_bound: float
    """log K of its prompt, averaged over actions like the MI."""
    num_prompts: int
    num_actions: int
    num_constant_prompts: int
    """Those of them whose reasonings are all alike: their actions count 0."""
    num_skipped_prompts: int
    """Prompts with fewer than two actions: nothing to compare."""
    interval: Interval | None = None
    """95 % bootstrap interval over prompts; None without draws, and for fewer than 3 prompts."""
    p_value: float | None = None


def reasoning_action_information(
    scores: Sequence[ArrayLike],
    *,
    reasoning_keys: Sequence[Sequence[Hashable]] | None = None,
    bootstrap: int = 0,
    permutations: int = 0,
    seed: int = 0,
) -> ReasoningActionReport:
    """I(Z;A|X) from one matrix per prompt: `scores[x][k, l]` = log p(action k | x, reasoning l).

    Actions sit in rows, the reasoning each was taken after on the diagonal. The mixture is over
    all K reasonings as they were sampled, so a reasoning that came up twice counts twice. Where all
    `reasoning_keys` of a prompt are equal, reasoning does not vary and its actions count 0. Score
    actions with what ends them: "U" is the beginning of "U || R".
    """
    check_draws(bootstrap=bootstrap, permutations=permutations)
    if reasoning_keys is not None and len(reasoning_keys) != len(scores):
        raise MooredError(
            f"reasoning_keys must have one row per prompt, got {len(reasoning_keys)} for "
            f"{len(scores)}"
        )
    blocks = [_block(x, matrix) for x, matrix in enumerate(scores)]
    is_constant = [_num_distinct(x, b, reasoning_keys) == 1 for x, b in enumerate(blocks)]
    used = [
        _block(x, np.zeros_like(block.logp_MN)) if is_constant[x] else block
        for x, block in enumerate(blocks)
        if len(block.logp_MN) > 1
    ]
    num_skipped = len(blocks) - len(used)
    if not used:
        raise TooFewPromptsError(
            f"I(Z;A|X) needs a prompt with at least 2 actions, got {len(blocks)} prompts without"
        )
    rng = np.random.default_rng(seed)
    gains = [block.gain_M for block in used]
    mi_nats = float(np.concatenate(gains).mean())
    num_actions = sum(map(len, gains))
    return ReasoningActionReport(
        mi_nats=mi_nats,
        mi_upper_bound=sum(len(g) * math.log(len(g)) for g in gains) / num_actions,
        num_prompts=len(used),
        num_actions=num_actions,
        num_constant_prompts=sum(is_constant) - num_skipped,
        num_skipped_prompts=num_skipped,
        interval=_cluster_interval(gains, bootstrap, rng) if bootstrap else None,
        p_value=_shuffle_p_value(used, mi_nats, permutations, rng) if permutations else None,
    )


def _block(x: int, matrix: ArrayLike) -> Likelihood:
    logp_KK = np.asarray(matrix, dtype=np.float64)
    if logp_KK.ndim != 2 or logp_KK.shape[0] != logp_KK.shape[1] or len(logp_KK) == 0:
        raise MooredError(f"scores[{x}] must be (K, K), actions by reasonings, got {logp_KK.shape}")
    if not np.isfinite(logp_KK).all():
        raise MooredError(f"scores[{x}] holds values that are not finite; look at its scoring")
    return Likelihood.of(logp_KK, np.arange(len(logp_KK)))


def _num_distinct(
    x: int, block: Likelihood, reasoning_keys: Sequence[Sequence[Hashable]] | None
) -> int:
    num_columns = len(block.columns_M)
    keys = range(num_columns) if reasoning_keys is None else reasoning_keys[x]
    if len(keys) != num_columns:
        raise MooredError(f"reasoning_keys[{x}] has {len(keys)} keys for {num_columns} columns")
    return len(set(keys))


def _cluster_interval(
    gains: list[np.ndarray], draws: int, rng: np.random.Generator
) -> Interval | None:
    """Prompts drawn with replacement; their rows stay together."""
    if len(gains) < MIN_PROMPTS:
        return None
    sums, counts = np.array([g.sum() for g in gains]), np.array([len(g) for g in gains])
    picks = rng.integers(len(gains), size=(draws, len(gains)))
    low, high = np.quantile(sums[picks].sum(axis=1) / counts[picks].sum(axis=1), [0.025, 0.975])
    return Interval(float(low), float(high))


def _shuffle_p_value(
    blocks: list[Likelihood], observed: float, draws: int, rng: np.random.Generator
) -> float:
    """Chance of such a value when reasonings are shuffled among the actions of their prompt."""
    null = np.zeros(draws)
    for block in blocks:
        shuffled = rng.permuted(np.tile(block.columns_M, (draws, 1)), axis=1)
        null += block.gain_if_MN[np.arange(len(block.columns_M)), shuffled].sum(axis=1)
    null /= sum(len(block.columns_M) for block in blocks)
    slack = 1e-9 * (1.0 + abs(observed))
    return float((1 + np.count_nonzero(null >= observed - slack)) / (draws + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReport:
    """I(X;A): whether actions depend on the prompt at all."""

    mi_plugin_nats: float
    """From the observed counts; too high when there are few samples per cell."""
    mi_corrected_nats: float
    """Miller-Madow: minus (K_xa - K_x - K_a + 1) / (2 n), with K the occupied cells."""
    mi_null_mean_nats: float | None
    """Mean plug-in estimate when actions are shuffled; what pure sampling noise looks like."""
    p_value: float | None
    num_samples: int
    num_prompts: int
    num_distinct_actions: int


def action_information(
    prompts: Sequence[Hashable],
    actions: Sequence[Hashable],
    *,
    permutations: int = 0,
    seed: int = 0,
) -> ActionReport:
    """I(X;A) over action strings; `prompts[i]` names the prompt that `actions[i]` answered."""
    check_draws(permutations=permutations)
    if len(prompts) != len(actions):
        raise MooredError(f"one action per prompt, got {len(prompts)} and {len(actions)}")
    x, num_x = _codes(prompts)
    a, num_a = _codes(actions)
    if num_x < 2:
        raise TooFewPromptsError(f"I(X;A) needs at least 2 distinct prompts, got {num_x}")
    plugin, num_cells = _plugin_mi(x, a, num_a)
    null = np.zeros(0)
    if permutations:
        rng = np.random.default_rng(seed)
        null = np.array([_plugin_mi(x, rng.permutation(a), num_a)[0] for _ in range(permutations)])
    as_large = 1 + np.count_nonzero(null >= plugin - 1e-9)
    return ActionReport(
        mi_plugin_nats=plugin,
        mi_corrected_nats=plugin - (num_cells - num_x - num_a + 1) / (2 * len(x)),
        mi_null_mean_nats=float(null.mean()) if permutations else None,
        p_value=float(as_large / (permutations + 1)) if permutations else None,
        num_samples=len(x),
        num_prompts=num_x,
        num_distinct_actions=num_a,
    )


def _codes(labels: Sequence[Hashable]) -> tuple[np.ndarray, int]:
    index: dict[Hashable, int] = {}
    codes = np.array([index.setdefault(label, len(index)) for label in labels], dtype=np.intp)
    return codes, len(index)


def _plugin_mi(x: np.ndarray, a: np.ndarray, num_a: int) -> tuple[float, int]:
    """H(X) + H(A) - H(X,A) of the empirical distribution, and the number of occupied cells."""
    joint = np.unique(x * num_a + a, return_counts=True)[1]
    entropies = [_entropy(np.bincount(x)), _entropy(np.bincount(a)), _entropy(joint)]
    return max(entropies[0] + entropies[1] - entropies[2], 0.0), len(joint)


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def state_action(groups: Sequence[Group]) -> ActionReport:
    """I(X;A) of the first turns that hold an action."""
    acted = [turn for turns in _first_turns(groups) for turn in turns if len(turn.action_ids)]
    return action_information(
        [turn.prompt.key for turn in acted],
        [tuple(turn.ended_action_ids.tolist()) for turn in acted],
    )


def reasoning_action(
    groups: Sequence[Group], score: ScoreFn, *, rollouts: int = 4
) -> ReasoningActionReport:
    """I(Z;A|X) of the first turns; `rollouts` of each group, whose square is scored."""
    full = [
        [turn for turn in turns if len(turn.reasoning_ids) and len(turn.action_ids)]
        for turns in _first_turns(groups)
    ]
    used = [turns[:rollouts] for turns in full if turns]
    keys = [[turn.reasoning_ids.tobytes() for turn in turns] for turns in used]
    # Reasonings that are all alike count 0 and need no scores.
    varied = [turns for turns, own in zip(used, keys, strict=True) if len(set(own)) > 1]
    scored = iter(_score_blocks(varied, score))
    blocks = [next(scored) if len(set(own)) > 1 else np.zeros((len(own), len(own))) for own in keys]
    return reasoning_action_information(blocks, reasoning_keys=keys)


def _first_turns(groups: Sequence[Group]) -> list[list[Turn]]:
    return [[t.turns[0] for t in group.trajectories if t.turns] for group in groups]


def _score_blocks(groups: Sequence[Sequence[Turn]], score: ScoreFn) -> list[np.ndarray]:
    """(K, K) scores of each group: action k, with what ends it, after the reasoning of turn l."""
    requests = [
        ScoreRequest(_up_to_action(turn), [other.ended_action_ids for other in turns])
        for turns in groups
        for turn in turns
    ]
    columns = iter(score(requests) if requests else ())
    return [
        np.array([[float(np.sum(x)) for x in next(columns)] for _ in turns]).T for turns in groups
    ]


def _up_to_action(turn: Turn) -> Prompt:
    """What a turn answered, and its reply up to the action."""
    assert turn.answer_span is not None
    return turn.prompt.then(turn.completion_ids[: turn.answer_span[0]])
