"""Which (prompt, reasoning) pairs to cross-score, drawn from recorded groups; and their scores.

Four views: the first turn (a prompt is its group), trajectory-uniform, turn-uniform, and one turn
position; observation swap is in `swap`. Every draw is seeded and without replacement: a pair set is
never padded with repeats, and says how many pairs there were to choose from and how many reasonings
were empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Protocol, TypeVar

import numpy as np

from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group, Prompt, ScoreRequest, Trajectory

T = TypeVar("T")
ABOVE_ROUNDING = 0.01
"""Rounding puts no log-probability as far above 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One reasoning and the prompt it was written for."""

    prompt: Prompt
    continuation: np.ndarray
    """Sampled tokens up to the end of the reasoning, opening tag included."""
    num_opening: int
    """Tokens of `continuation` before the reasoning: they are context, and are not scored."""
    group_id: int
    trajectory: int
    turn: int
    reward: float = math.nan
    """Of its episode, for the task; NaN where it is not known."""

    @property
    def length(self) -> int:
        """Reasoning tokens, the opening tag not counted."""
        return len(self.continuation) - self.num_opening


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A request to the model, and where the scores of its continuations belong."""

    request: ScoreRequest
    cells: Sequence[tuple[int, int, int]]
    """Per continuation: row, column, and how many of its first tokens are not scored."""


class CrossScored(Protocol):
    """Rows and columns of a matrix of scores, and the requests that fill it."""

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        ...

    def asks(self) -> list[Ask]: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PairSet:
    """Pairs ready for cross-scoring: N distinct prompts, M reasonings."""

    view: str
    pairs: tuple[Pair, ...]
    prompts: tuple[Prompt, ...]
    """Distinct prompts; equal ones are merged. The last ones may have no reasoning here: they are
    columns that the other prompts' reasonings are compared with."""
    columns: np.ndarray
    """(M,) index of each reasoning's own prompt."""
    num_available: int
    """Non-empty reasonings the draw chose from."""
    num_empty: int
    """Turns of the view that hold no reasoning."""

    @property
    def lengths(self) -> np.ndarray:
        """(M,) reasoning tokens, opening tags not counted."""
        return np.array([pair.length for pair in self.pairs], dtype=np.intp)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.pairs), len(self.prompts)

    def asks(self) -> list[Ask]:
        """One request per prompt, with all reasonings."""
        continuations = [pair.continuation for pair in self.pairs]
        openings = [pair.num_opening for pair in self.pairs]
        return [
            Ask(ScoreRequest(prompt, continuations), [(m, j, n) for m, n in enumerate(openings)])
            for j, prompt in enumerate(self.prompts)
        ]


def first_turn_pairs(
    groups: Sequence[Group],
    *,
    num_prompts: int | None = None,
    num_pairs: int = 64,
    seed: int = 0,
) -> PairSet:
    """First turns; the reasonings are spread evenly over the prompts.

    Give `num_prompts` in a run: the ceiling of MI is log N, so curves need a fixed N. None takes
    all prompts, `num_pairs` of them at most. Prompts without a reasoning fill up the N columns
    where needed; at least half of the N must have one.
    """
    check_counts(num_pairs, num_prompts)
    rng = np.random.default_rng(seed)
    pairs, num_empty = _collect_flat(groups, turns=(0,))
    by_prompt: dict[bytes, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt.key, []).append(pair)
    stacks = list(by_prompt.values())
    silent = _first_prompts(groups, without=by_prompt)
    num_found = len(stacks) + len(silent)
    wanted = max(2, min(num_found, num_pairs)) if num_prompts is None else num_prompts
    if num_found < wanted:
        raise TooFewPromptsError(
            f"the first-turn view needs {wanted} distinct prompts, got {num_found} from "
            f"{len(groups)} groups; lower num_prompts or roll out more groups"
        )
    if len(stacks) < min_with_reasoning(wanted):
        raise TooFewPromptsError(
            f"the first-turn view needs reasonings of at least {min_with_reasoning(wanted)} of "
            f"{wanted} distinct prompts, got reasonings of {len(stacks)}"
        )
    chosen = sorted(rng.permutation(len(stacks))[:wanted])
    shuffled = [[stacks[i][k] for k in rng.permutation(len(stacks[i]))] for i in chosen]
    num_background = wanted - len(chosen)
    background = [silent[i] for i in rng.permutation(len(silent))[:num_background]]
    return _pair_set("first_turn", deal(shuffled), num_pairs, len(pairs), num_empty, background)


def min_with_reasoning(num_prompts: int) -> int:
    """How many of N prompts need a reasoning: half of them, and two to compare."""
    return max(2, math.ceil(num_prompts / 2))


def deal(stacks: Sequence[Sequence[T]]) -> list[T]:
    """One of each stack, then a second of each, …"""
    return [item for item in chain.from_iterable(zip_longest(*stacks)) if item is not None]


def _first_prompts(groups: Sequence[Group], *, without: Mapping[bytes, object]) -> list[Prompt]:
    """Distinct first prompts whose keys are not in `without`."""
    first = (t.turns[0].prompt for group in groups for t in group.trajectories if t.turns)
    return list({p.key: p for p in first if p.key not in without}.values())


def trajectory_pairs(groups: Sequence[Group], *, num_pairs: int = 64, seed: int = 0) -> PairSet:
    """A trajectory uniformly, then one of its turns uniformly; X is the whole dialogue before it.

    Trajectories are visited in random order, each giving a turn it has not given yet.
    """
    check_counts(num_pairs)
    rng = np.random.default_rng(seed)
    stacks, num_empty = _collect(groups)
    orders = [[stack[i] for i in rng.permutation(len(stack))] for stack in stacks]
    dealt = deal([orders[i] for i in rng.permutation(len(orders))])
    return _pair_set("trajectory", dealt, num_pairs, len(dealt), num_empty)


def turn_pairs(groups: Sequence[Group], *, num_pairs: int = 64, seed: int = 0) -> PairSet:
    """Every turn with the same chance, so that long trajectories weigh more."""
    check_counts(num_pairs)
    rng = np.random.default_rng(seed)
    pairs, num_empty = _collect_flat(groups)
    dealt = [pairs[i] for i in rng.permutation(len(pairs))]
    return _pair_set("turn", dealt, num_pairs, len(pairs), num_empty)


def turn_position_pairs(
    groups: Sequence[Group], position: int, *, num_pairs: int = 64, seed: int = 0
) -> PairSet:
    """Turns at one position (0 is the first): collapse may start late in an episode."""
    check_counts(num_pairs)
    if position < 0:
        raise MooredError(f"position counts turns from 0, the first, got {position}")
    rng = np.random.default_rng(seed)
    pairs, num_empty = _collect_flat(groups, turns=(position,))
    dealt = [pairs[i] for i in rng.permutation(len(pairs))]
    return _pair_set(f"turn_{position + 1}", dealt, num_pairs, len(pairs), num_empty)


def check_counts(num_pairs: int, num_prompts: int | None = None) -> None:
    if num_pairs < 1:
        raise MooredError(f"num_pairs must be at least 1, got {num_pairs}")
    if num_prompts is None:
        return
    if num_prompts < 2:
        raise TooFewPromptsError(f"num_prompts must be at least 2 to compare, got {num_prompts}")
    if num_pairs < num_prompts:
        raise MooredError(
            f"num_pairs must be at least num_prompts, so that every prompt has a reasoning, got "
            f"{num_pairs} pairs for {num_prompts} prompts"
        )


def _collect(
    groups: Sequence[Group], turns: Sequence[int] | None = None
) -> tuple[list[list[Pair]], int]:
    """Non-empty reasonings of each trajectory's turns (default: all), and how many were empty."""
    stacks, num_empty = [], 0
    for group in groups:
        for index, trajectory in enumerate(group.trajectories):
            wanted = range(trajectory.num_turns) if turns is None else turns
            places = [t for t in wanted if t < trajectory.num_turns]
            pairs = [make_pair(group.group_id, index, trajectory, t) for t in places]
            stacks.append([pair for pair in pairs if pair is not None])
            num_empty += len(pairs) - len(stacks[-1])
    return [stack for stack in stacks if stack], num_empty


def _collect_flat(
    groups: Sequence[Group], turns: Sequence[int] | None = None
) -> tuple[list[Pair], int]:
    stacks, num_empty = _collect(groups, turns)
    return list(chain.from_iterable(stacks)), num_empty


def make_pair(group_id: int, index: int, trajectory: Trajectory, t: int) -> Pair | None:
    """The pair of one turn; None when it holds no reasoning."""
    turn = trajectory.turns[t]
    start, stop = turn.think_span or (0, 0)
    if stop == start:
        return None
    reasoning = turn.completion_ids[:stop]
    return Pair(turn.prompt, reasoning, start, group_id, index, t, trajectory.task_reward)


def _pair_set(
    view: str,
    dealt: list[Pair],
    num_pairs: int,
    num_available: int,
    num_empty: int,
    background: Sequence[Prompt] = (),
) -> PairSet:
    pairs = dealt[:num_pairs]
    index: dict[bytes, int] = {}
    columns = np.array([index.setdefault(p.prompt.key, len(index)) for p in pairs], dtype=np.intp)
    if len(index) < 2:
        raise TooFewPromptsError(
            f"the {view} view needs at least 2 distinct prompts with a reasoning, got {len(index)} "
            f"({num_available} reasonings, {num_empty} turns without one)"
        )
    prompts: dict[int, Prompt] = {}
    for pair, column in zip(pairs, columns.tolist(), strict=True):
        prompts.setdefault(column, pair.prompt)
    return PairSet(
        view=view,
        pairs=tuple(pairs),
        prompts=(*prompts.values(), *background),
        columns=columns,
        num_available=num_available,
        num_empty=num_empty,
    )


class ScoreFn(Protocol):
    """The model: for each request the log-probabilities of the tokens of its continuations.

    All requests come in one call, so that an implementation computes each prompt once and makes
    one round trip.
    """

    def __call__(self, requests: Sequence[ScoreRequest]) -> Sequence[Sequence[np.ndarray]]: ...


def cross_score(pairs: CrossScored, score: ScoreFn) -> np.ndarray:
    """(M, N) log-likelihood of each reasoning under each prompt, summed over its tokens.

    Opening tags are conditioned on and not counted. Feed the result to `information` with
    `pairs.columns` and `pairs.lengths`.
    """
    logp_MN = np.full(pairs.shape, np.nan)
    asks = pairs.asks()
    found = score([ask.request for ask in asks])
    if not isinstance(found, Sequence) or len(found) != len(asks):
        got = len(found) if isinstance(found, Sequence) else type(found).__name__
        raise MooredError(
            f"the score function must return one list for each request, got {got} for "
            f"{len(asks)} requests"
        )
    for number, (ask, scored) in enumerate(zip(asks, found, strict=True)):
        logps = [_as_array(logp, number) for logp in scored]
        lengths = [len(ids) for ids in ask.request.continuations]
        if [logp.size for logp in logps] != lengths:
            raise MooredError(
                f"the score function must return one log-probability per continuation token; for "
                f"request {number} it returned {[logp.size for logp in logps]} values for "
                f"{lengths} tokens"
            )
        highest = max((logp.max(initial=0.0) for logp in logps), default=0.0)
        if highest > ABOVE_ROUNDING:
            raise MooredError(
                f"the score function must return log-probabilities, which are at most 0, got "
                f"{highest:.4g} for request {number}; is it a loss, whose sign is the opposite?"
            )
        for (m, j, num_context), logp in zip(ask.cells, logps, strict=True):
            logp_MN[m, j] = logp[num_context:].sum()
    return logp_MN


def _as_array(logp: object, number: int) -> np.ndarray:
    """Log-probabilities of one continuation, as a score function returned them."""
    try:
        return np.asarray(logp, dtype=np.float64).ravel()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MooredError(
            f"the score function must return log-probabilities as arrays or lists, got "
            f"{type(logp).__name__} for request {number} ({error}); of a torch tensor return "
            f"tensor.detach().float().cpu().numpy()"
        ) from error
