"""The rest of the chain X -> Z -> A: its links in the log, and whether reasoning controls action.

`reasoning_action_information` estimates I(Z;A|X) from K x K scores per block; `reasoning_action`
applies it to the turns of recorded groups of one environment. I(X;A) is in `actions`.
Shape legend: K actions of a block, M actions of all blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.diagnostics.information import Likelihood
from moored.diagnostics.pairs import Ask, ScoreFn, cross_score, deal
from moored.diagnostics.report import Interval
from moored.diagnostics.resampling import (
    check_draws,
    permutation_p_values,
    standard_errors,
    t_quantile,
)
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group, ScoreRequest, Turn

CHAIN = "collapse_chain"
"""Prefix of the names in the log."""
LINKS = {"state_action_mi": "I(X;A)", "reasoning_action_mi": "I(Z;A|X)"}
"""Their names in the log -> in formulas."""
MIN_PROMPTS = 3
"""For an interval: two tasks are one comparison, whose scatter is nowhere to be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One arrow of the chain: how much more the one says about the other than by chance."""

    mi_nats: float
    interval: Interval | None = None
    """95 %, by Student's t over prompts; None for fewer than 3."""
    p_value: float | None = None
    """Chance of such a value where there is no dependence; None without draws."""

    def metrics(self, name: str) -> dict[str, float]:
        """The logged numbers, `name` with its prefix."""
        found = {name: self.mi_nats}
        if self.interval is not None:
            found |= {f"{name}_low": self.interval.low, f"{name}_high": self.interval.high}
        return found if self.p_value is None else found | {f"{name}_p": self.p_value}

    @staticmethod
    def from_log(record: Mapping[str, object], name: str) -> Link | None:
        """What `metrics` wrote into a record; None where it wrote nothing.

        Nor is a value alone a finding: it does not say what chance gives.
        """
        value, low, high, p = (
            value if isinstance(value := record.get(name + end), int | float) else None
            for end in ("", "_low", "_high", "_p")
        )
        if value is None or (low is None and p is None):
            return None
        interval = None if low is None or high is None else Interval(low, high)
        return Link(mi_nats=value, interval=interval, p_value=p)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningActionReport(Link):
    """I(Z;A|X): how much the reasoning of a trajectory says about its own action."""

    mi_upper_bound: float
    """log K of its block, averaged over actions like the MI."""
    num_prompts: int
    num_actions: int
    num_constant_blocks: int
    """Those whose reasonings are all alike: their actions count 0."""
    num_skipped_blocks: int
    """Those with fewer than two actions: nothing to compare."""


def reasoning_action_information(
    scores: Sequence[ArrayLike],
    *,
    reasoning_keys: Sequence[Sequence[Hashable]] | None = None,
    prompts: Sequence[Hashable] | None = None,
    permutations: int = 0,
    seed: int = 0,
) -> ReasoningActionReport:
    """I(Z;A|X) from one matrix per block: `scores[b][k, l]` = log p(action k | its context, z_l).

    A block is a prompt, or a turn number of one; `prompts[b]` names its prompt, by default each
    block is one. Actions sit in rows, the reasoning each was taken after on the diagonal. The
    mixture is over all K reasonings as they were sampled, so a reasoning that came up twice counts
    twice. Where all `reasoning_keys` of a block are equal, reasoning does not vary and its actions
    count 0. Score actions with what ends them: "U" is the beginning of "U || R".
    """
    check_draws(permutations=permutations)
    for name, labels in {"reasoning_keys": reasoning_keys, "prompts": prompts}.items():
        if labels is not None and len(labels) != len(scores):
            raise MooredError(
                f"{name} must have one row per block, got {len(labels)} for {len(scores)}"
            )
    blocks = [_block(b, matrix) for b, matrix in enumerate(scores)]
    is_constant = [_num_distinct(b, x, reasoning_keys) == 1 for b, x in enumerate(blocks)]
    used = [b for b, block in enumerate(blocks) if len(block) > 1]
    if not used:
        raise TooFewPromptsError(
            f"I(Z;A|X) needs a prompt with at least 2 actions, got {len(blocks)} prompts without"
        )
    gains = [_gain_if(blocks[b] * (not is_constant[b])) for b in used]
    sizes = [len(gain_if_KK) for gain_if_KK in gains]
    gain_if_MK = np.concatenate([np.pad(x, ((0, 0), (0, max(sizes) - len(x)))) for x in gains])
    columns_M = np.concatenate([np.arange(size) for size in sizes])
    gain_M = gain_if_MK[np.arange(len(columns_M)), columns_M]
    names = [b if prompts is None else prompts[b] for b in used]
    tasks_M = np.repeat(number_labels(names), sizes)
    bound = float(np.repeat(np.log(sizes), sizes).mean())
    p_value = None
    if permutations:
        blocks_M, rng = np.repeat(np.arange(len(sizes)), sizes), np.random.default_rng(seed)
        shuffled = permutation_p_values(
            gain_if_MK[None], columns_M, blocks_M, draws=permutations, rng=rng
        )
        p_value = float(shuffled[0])
    return ReasoningActionReport(
        mi_nats=float(gain_M.mean()),
        mi_upper_bound=bound,
        num_prompts=int(tasks_M.max()) + 1,
        num_actions=len(gain_M),
        num_constant_blocks=sum(is_constant[b] for b in used),
        num_skipped_blocks=len(blocks) - len(used),
        interval=_mean_interval(gain_M, tasks_M, bound),
        p_value=p_value,
    )


def _gain_if(logp_KK: np.ndarray) -> np.ndarray:
    """How much likelier action k is after reasoning l than after the mixture of all."""
    return Likelihood.of(logp_KK, np.arange(len(logp_KK))).gain_if_MN


def _block(b: int, matrix: ArrayLike) -> np.ndarray:
    logp_KK = np.asarray(matrix, dtype=np.float64)
    if logp_KK.ndim != 2 or logp_KK.shape[0] != logp_KK.shape[1] or len(logp_KK) == 0:
        raise MooredError(f"scores[{b}] must be (K, K), actions by reasonings, got {logp_KK.shape}")
    if not np.isfinite(logp_KK).all():
        raise MooredError(f"scores[{b}] holds values that are not finite; look at its scoring")
    return logp_KK


def _num_distinct(
    b: int, block: np.ndarray, reasoning_keys: Sequence[Sequence[Hashable]] | None
) -> int:
    keys = range(len(block)) if reasoning_keys is None else reasoning_keys[b]
    if len(keys) != len(block):
        raise MooredError(f"reasoning_keys[{b}] has {len(keys)} keys for {len(block)} columns")
    return len(set(keys))


def _mean_interval(gain_M: np.ndarray, tasks_M: np.ndarray, bound: float) -> Interval | None:
    """Prompts as independent units; their actions stay together."""
    count = int(tasks_M.max()) + 1
    if count < MIN_PROMPTS:
        return None
    error = float(standard_errors(gain_M[None], np.zeros((1, count)), tasks_M)[0])
    mean, half = float(gain_M.mean()), t_quantile(count - 1) * error
    return Interval(mean - half, min(mean + half, bound))


def number_labels(labels: Iterable[Hashable]) -> np.ndarray:
    """Equal labels as equal numbers, from 0."""
    index: dict[Hashable, int] = {}
    return np.array([index.setdefault(label, len(index)) for label in labels], dtype=np.intp)


def with_tasks(groups: Sequence[Group]) -> list[tuple[bytes, Group]]:
    """Groups that have turns, each with the key of what its episodes began with."""
    firsts = ((g, next((t.turns[0] for t in g.trajectories if t.turns), None)) for g in groups)
    return [(turn.prompt.key, group) for group, turn in firsts if turn is not None]


@dataclass(frozen=True, slots=True, eq=False)
class ActionBlocks:
    """Turns of one group and turn number in each block: actions in rows, reasonings in columns."""

    blocks: Sequence[Sequence[Turn]]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.blocks)), max(map(len, self.blocks))

    def asks(self) -> list[Ask]:
        asks, first = [], 0
        for turns in self.blocks:
            contexts: dict[bytes, list[int]] = {}
            for k, turn in enumerate(turns):
                contexts.setdefault(turn.prompt.key, []).append(k)
            for members in contexts.values():
                asks += _ask_in_context(turns, members, first)
            first += len(turns)
        return asks

    def matrices(self, score: ScoreFn) -> list[np.ndarray]:
        """(K, K) scores of each block."""
        logp_MK = cross_score(self, score)
        rows = iter(logp_MK)
        return [np.array([next(rows)[: len(turns)] for _ in turns]) for turns in self.blocks]


def _ask_in_context(turns: Sequence[Turn], members: Sequence[int], first: int) -> list[Ask]:
    """The actions of `members`, which saw the same, each after the reasonings of all turns.

    The context as prompt costs |x| + R * Z tokens for R members and Z tokens of reasonings, a
    prompt for each reasoning K * |x| + Z.
    """
    prompt = turns[members[0]].prompt
    actions = [turns[k].ended_action_ids for k in members]
    thoughts = [_up_to_action(turn) for turn in turns]
    more_thoughts = (len(members) - 1) * sum(map(len, thoughts))
    if more_thoughts < (len(turns) - 1) * len(prompt.ids):
        both = [np.concatenate([z, action]) for action in actions for z in thoughts]
        cells = [(first + k, j, len(z)) for k in members for j, z in enumerate(thoughts)]
        return [Ask(ScoreRequest(prompt, both), cells)]
    return [
        Ask(ScoreRequest(prompt.then(z), actions), [(first + k, j, 0) for k in members])
        for j, z in enumerate(thoughts)
    ]


def _up_to_action(turn: Turn) -> np.ndarray:
    assert turn.answer_span is not None
    return turn.completion_ids[: turn.answer_span[0]]


def reasoning_action(
    groups: Sequence[Group],
    score: ScoreFn,
    *,
    rollouts: int = 4,
    num_pairs: int = 64,
    permutations: int = 0,
    seed: int = 0,
) -> ReasoningActionReport:
    """I(Z;A|X) over turns: `rollouts` of a group at a turn number are a block.

    Blocks of about `num_pairs` actions in all are drawn, each group in turn giving one of its turn
    numbers at random.
    """
    found = [(task, _blocks_of(group, rollouts)) for task, group in with_tasks(groups)]
    rng = np.random.default_rng(seed)
    stacks = [[(task, own[i]) for i in rng.permutation(len(own))] for task, own in found]
    order = rng.permutation(len(stacks))
    drawn = deal([stacks[i] for i in order])[: max(1, num_pairs // rollouts)]
    blocks = [turns for _, turns in drawn]
    keys = [[turn.reasoning_ids.tobytes() for turn in turns] for turns in blocks]
    # Reasonings that are all alike count 0 and need no scores.
    varied = [turns for turns, own in zip(blocks, keys, strict=True) if len(set(own)) > 1]
    scored = iter(ActionBlocks(varied).matrices(score) if varied else ())
    matrices = [
        next(scored) if len(set(own)) > 1 else np.zeros((len(own), len(own))) for own in keys
    ]
    return reasoning_action_information(
        matrices,
        reasoning_keys=keys,
        prompts=[task for task, _ in drawn],
        permutations=permutations,
        seed=seed,
    )


def _blocks_of(group: Group, rollouts: int) -> list[list[Turn]]:
    """The first turns with reasoning and action of each turn number that has two of them."""
    by_turn: dict[int, list[Turn]] = {}
    for trajectory in group.trajectories:
        for t, turn in enumerate(trajectory.turns):
            if len(turn.reasoning_ids) and len(turn.action_ids):
                by_turn.setdefault(t, []).append(turn)
    return [turns[:rollouts] for turns in by_turn.values() if len(turns) > 1]
