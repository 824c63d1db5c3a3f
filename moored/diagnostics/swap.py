"""Observation swap, I(X_t;Z_t | history): does a reasoning use the newest observation?

A reasoning is scored after its own history with the newest observation exchanged for others of the
same environment and turn number: L[m, j] = log p(z_m | h_m, o_j). A policy that copies its earlier
reasoning, or writes one text per turn number, scores the same in every column and gets exactly 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from moored.diagnostics.pairs import (
    Ask,
    Pair,
    check_counts,
    deal,
    make_pair,
    min_with_reasoning,
)
from moored.errors import TooFewPromptsError
from moored.types import Group, Prompt, ScoreRequest, Turn, content_images


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SwapSet:
    """M reasonings in blocks; each block has its own N distinct observations of one turn number."""

    pairs: tuple[Pair, ...]
    histories: tuple[Prompt, ...]
    """(M) what stood before the newest observation."""
    blocks: np.ndarray
    """(M,) block of each reasoning: a position in `observations`."""
    columns: np.ndarray
    """(M,) which observation of its block each reasoning answered."""
    observations: tuple[tuple[Prompt, ...], ...]
    """The N observations of each block, as tokens that follow a history."""
    owners: tuple[tuple[int, ...], ...]
    """The group that saw each of them first."""
    num_available: int
    """Reasonings the draw chose from."""
    num_left_out: int
    """Further reasonings, at turn numbers with fewer than N distinct observations."""
    view: str = "observation_swap"

    @property
    def lengths(self) -> np.ndarray:
        """(M,) reasoning tokens, opening tags not counted."""
        return np.array([pair.length for pair in self.pairs], dtype=np.intp)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.pairs), len(self.observations[0])

    @property
    def share_left_out(self) -> float:
        """Share of the reasonings that no column set could be found for."""
        return self.num_left_out / (self.num_available + self.num_left_out)

    def asks(self) -> list[Ask]:
        """Requests in which every history is computed once, or every history with observation.

        Rows with one history and block go together. Their history as prompt costs |h| + R * O
        tokens for R rows and O observation tokens, every prompt written out N * |h| + O.
        """
        rows: dict[tuple[int, bytes], list[int]] = {}
        for m, history in enumerate(self.histories):
            rows.setdefault((int(self.blocks[m]), history.key), []).append(m)
        asks = []
        for (block, _), members in rows.items():
            history, observed = self.histories[members[0]], self.observations[block]
            num_observed = sum(len(observation.ids) for observation in observed)
            more_observed = (len(members) - 1) * num_observed
            has_images = any(observation.images for observation in observed)
            # A continuation is ids only: an image has to be in the prompt.
            if more_observed < (len(observed) - 1) * len(history.ids) and not has_images:
                asks.append(self._after_history(history, observed, members))
            else:
                asks += self._after_observations(history, observed, members)
        return asks

    def _after_history(
        self, history: Prompt, observed: Sequence[Prompt], members: Sequence[int]
    ) -> Ask:
        continuations, cells = [], []
        for m in members:
            pair = self.pairs[m]
            for j, observation in enumerate(observed):
                continuations.append(np.concatenate([observation.ids, pair.continuation]))
                cells.append((m, j, len(observation.ids) + pair.num_opening))
        return Ask(ScoreRequest(history, continuations), cells)

    def _after_observations(
        self, history: Prompt, observed: Sequence[Prompt], members: Sequence[int]
    ) -> list[Ask]:
        continuations = [self.pairs[m].continuation for m in members]
        return [
            Ask(
                ScoreRequest(
                    history.then(observation.ids, images=observation.images), continuations
                ),
                [(m, j, self.pairs[m].num_opening) for m in members],
            )
            for j, observation in enumerate(observed)
        ]


def observation_swap_pairs(
    groups: Sequence[Group],
    *,
    num_prompts: int | None = None,
    num_pairs: int = 64,
    seed: int = 0,
) -> SwapSet:
    """Turns of one environment: a trajectory uniformly, then one of its turns.

    `num_prompts` is N, the observations of a column set; None takes as many as there are at turn 1,
    `num_pairs` at most. Turn numbers with fewer than N distinct observations are left out.
    """
    check_counts(num_pairs, num_prompts)
    rng = np.random.default_rng(seed)
    turns, num_reasonings = _collect(groups)
    if num_prompts is None:
        first = next(iter(turns.values()), _Seen())
        num_prompts = max(2, min(len(first.observations), num_pairs))
    usable = {t: seen for t, seen in turns.items() if seen.is_enough(num_prompts)}
    if not usable:
        raise TooFewPromptsError(_why_none(turns, num_reasonings, num_prompts))
    quotas = _quotas(usable, num_pairs, rng)
    blocks = _Blocks(num_prompts)
    for t, seen in usable.items():
        blocks.draw(seen, quotas[t], rng)
    num_available = sum(seen.num_reasonings for seen in usable.values())
    return blocks.swap_set(num_available, num_reasonings - num_available)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """A reasoning that answered an observation."""

    pair: Pair
    history: Prompt
    trajectory: int
    """Number of the trajectory among all."""


@dataclass(slots=True)
class _Seen:
    """One turn number: its distinct observations, and the reasonings that answered each."""

    observations: dict[bytes, Prompt] = field(default_factory=dict)
    answers: dict[bytes, list[_Answer]] = field(default_factory=dict)
    """By observation; one that got no valid reasoning is missing here."""
    owners: dict[bytes, int] = field(default_factory=dict)
    """By observation: the group that saw it first."""

    @property
    def num_reasonings(self) -> int:
        return sum(map(len, self.answers.values()))

    def is_enough(self, num_prompts: int) -> bool:
        has_answers = len(self.answers) >= min_with_reasoning(num_prompts)
        return has_answers and len(self.observations) >= num_prompts


def _collect(groups: Sequence[Group]) -> tuple[dict[int, _Seen], int]:
    """What was seen at each turn number, and the number of reasonings in all."""
    turns: dict[int, _Seen] = {}
    num_reasonings = 0
    members = ((group, i) for group in groups for i in range(len(group.trajectories)))
    for number, (group, index) in enumerate(members):
        trajectory = group.trajectories[index]
        for t, turn in enumerate(trajectory.turns):
            pair = make_pair(group.group_id, index, trajectory, t)
            num_reasonings += pair is not None
            if turn.observation_start is None:
                continue
            history, observation = _split_prompt(turn, turn.observation_start)
            seen = turns.setdefault(t, _Seen())
            seen.observations.setdefault(observation.key, observation)
            seen.owners.setdefault(observation.key, group.group_id)
            if pair is not None:
                answer = _Answer(pair, history, number)
                seen.answers.setdefault(observation.key, []).append(answer)
    return dict(sorted(turns.items())), num_reasonings


def _split_prompt(turn: Turn, start: int) -> tuple[Prompt, Prompt]:
    """What stood before the newest observation, and the observation."""
    ids, images = turn.prompt.ids, turn.prompt.images
    num_earlier = len(images) - len(content_images(turn.seen)) if start else 0
    return Prompt(ids[:start], images[:num_earlier]), Prompt(ids[start:], images[num_earlier:])


def _quotas(usable: Mapping[int, _Seen], num_pairs: int, rng: np.random.Generator) -> Counter[int]:
    """How many rows each turn number gets: trajectories in turn, each with one of its turns."""
    turns: dict[int, list[int]] = {}
    for t, seen in usable.items():
        for answer in chain.from_iterable(seen.answers.values()):
            turns.setdefault(answer.trajectory, []).append(t)
    orders = [[stack[i] for i in rng.permutation(len(stack))] for stack in turns.values()]
    visits = deal([orders[i] for i in rng.permutation(len(orders))])
    return Counter(visits[:num_pairs])


@dataclass(slots=True)
class _Blocks:
    """Blocks of N observations as they are drawn."""

    num_prompts: int
    observations: list[tuple[Prompt, ...]] = field(default_factory=list)
    owners: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[tuple[_Answer, int, int]] = field(default_factory=list)
    """Answer, block, column."""

    def draw(self, seen: _Seen, quota: int, rng: np.random.Generator) -> None:
        """Add up to `quota` rows of one turn number, spread evenly over observations.

        Observations fill a block of N; where its rows are fewer than the quota, the next N
        observations make another. A later block needs two rows, so that they can be permuted.
        """
        answered = list(seen.answers)
        silent = [key for key in seen.observations if key not in seen.answers]
        order = [
            *(answered[i] for i in rng.permutation(len(answered))),
            *(silent[i] for i in rng.permutation(len(silent))),
        ]
        starts = range(0, len(order) - self.num_prompts + 1, self.num_prompts)
        for first in starts:
            keys = order[first : first + self.num_prompts]
            columns = [j for j, key in enumerate(keys) if key in seen.answers]
            too_few = len(columns) < min_with_reasoning(self.num_prompts)
            if too_few or quota < (2 if first else 1):
                return
            stacks = [
                [(seen.answers[keys[j]][i], j) for i in rng.permutation(len(seen.answers[keys[j]]))]
                for j in columns
            ]
            dealt = deal(stacks)[:quota]
            quota -= len(dealt)
            self.rows += [(answer, len(self.observations), j) for answer, j in dealt]
            self.observations.append(tuple(seen.observations[key] for key in keys))
            self.owners.append(tuple(seen.owners[key] for key in keys))

    def swap_set(self, num_available: int, num_left_out: int) -> SwapSet:
        answers, blocks, columns = zip(*self.rows, strict=True)
        return SwapSet(
            pairs=tuple(answer.pair for answer in answers),
            histories=tuple(answer.history for answer in answers),
            blocks=np.array(blocks, dtype=np.intp),
            columns=np.array(columns, dtype=np.intp),
            observations=tuple(self.observations),
            owners=tuple(self.owners),
            num_available=num_available,
            num_left_out=num_left_out,
        )


def _why_none(turns: Mapping[int, _Seen], num_reasonings: int, num_prompts: int) -> str:
    """Why there is nothing to compare."""
    if not turns and num_reasonings:
        return (
            "observation swap needs to know where the newest observation of a prompt begins, and "
            "this recorder of turns did not say; set Turn.observation_start"
        )
    most = max((len(seen.observations) for seen in turns.values()), default=0)
    return (
        f"observation swap needs a turn number with {num_prompts} distinct observations, at least "
        f"{min_with_reasoning(num_prompts)} of them with a reasoning, got at most {most} distinct "
        f"ones; lower num_prompts or roll out more groups"
    )
