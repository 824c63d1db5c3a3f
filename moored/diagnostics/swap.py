"""Swapped observations: does a reasoning use what was observed?

Two interventions, both among episodes of one environment and turn number:

- *observation swap* exchanges the newest observation alone, L[m, j] = log p(z_m | h_m, o_j);
- *episode swap* exchanges all observations together and keeps the agent's own replies,
  L[m, j] = log p(z_m | own replies, o_1..o_t of episode j).

A policy that copies its earlier reasoning, or writes one text per turn number, scores the same in
every column and gets exactly 0. A text that is merely less likely where a swapped observation
contradicts the rest gains from its own column, too. So every row has a *control*: the reasoning of
another task at the same turn number, scored in the same contexts. See `information`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from moored.diagnostics.information import Control
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

EPISODE_PROMPTS = 8
"""N of episode swap, at most: contexts share no history, so that a block costs N * N of them."""
EPISODE_ROWS = 40
"""Reasonings of episode swap, unless asked otherwise: 5 turn numbers of 8 episodes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SwapSet:
    """M reasonings in blocks; each block has its own N distinct columns of one turn number."""

    view: str
    pairs: tuple[Pair, ...]
    controls: tuple[Pair | None, ...]
    """(M) a reasoning of another task at the same turn number; None where there is none."""
    kept: tuple[tuple[Prompt, ...], ...]
    """(M) the pieces of a row's own dialogue that stay: one before each exchanged observation."""
    blocks: np.ndarray
    """(M,) block of each reasoning: a position in `observations`."""
    columns: np.ndarray
    """(M,) which column of its block each reasoning answered."""
    observations: tuple[tuple[tuple[Prompt, ...], ...], ...]
    """For each block N columns: the observations that are put in, as many as pieces are kept."""
    owners: tuple[tuple[int, ...], ...]
    """The group that saw each column first."""
    num_available: int
    """Reasonings the draw chose from."""
    num_left_out: int
    """Further reasonings, at turn numbers with fewer than N distinct columns."""

    @property
    def lengths(self) -> np.ndarray:
        """(M,) reasoning tokens, opening tags not counted."""
        return np.array([pair.length for pair in self.pairs], dtype=np.intp)

    @property
    def turns(self) -> np.ndarray:
        """(M,) turn number of each reasoning, from 0."""
        return np.array([pair.turn for pair in self.pairs], dtype=np.intp)

    @property
    def shape(self) -> tuple[int, int]:
        """(2M, N): the reasonings, then their controls."""
        return 2 * len(self.pairs), len(self.observations[0])

    def split(self, logp: np.ndarray) -> tuple[np.ndarray, Control]:
        """(M, N) scores of the reasonings, and those of the controls, from all together."""
        lengths = [control.length if control else 0 for control in self.controls]
        return logp[: len(self.pairs)], Control.of(logp[len(self.pairs) :], lengths, self.turns)

    @property
    def share_left_out(self) -> float:
        """Share of the reasonings that no column set could be found for."""
        return self.num_left_out / (self.num_available + self.num_left_out)

    def context(self, m: int, j: int) -> Prompt:
        """What reasoning m is scored after in column j."""
        pieces = zip(self.kept[m], self.observations[self.blocks[m]][j], strict=True)
        first, *rest = chain.from_iterable(pieces)
        images = tuple(image for piece in rest for image in piece.images)
        return first.then(*(piece.ids for piece in rest), images=images)

    def asks(self) -> list[Ask]:
        """Requests in which no context is computed twice, and a history once where that is cheaper.

        Rows with the same kept pieces and block go together. With one piece, a history, the
        observations may follow it as continuations: |h| + 2R * O tokens for R rows, their controls
        and O observation tokens, where every context written out takes N * |h| + O.
        """
        rows: dict[tuple[int, tuple[bytes, ...]], list[int]] = {}
        for m, kept in enumerate(self.kept):
            rows.setdefault((int(self.blocks[m]), tuple(p.key for p in kept)), []).append(m)
        asks = []
        for (block, pieces), members in rows.items():
            columns = self.observations[block]
            num_observed = sum(len(observation.ids) for column in columns for observation in column)
            more_observed = (2 * len(members) - 1) * num_observed
            more_history = (len(columns) - 1) * len(self.kept[members[0]][0].ids)
            # A continuation is ids only: an image has to be in the prompt.
            has_images = any(o.images for column in columns for o in column)
            if len(pieces) == 1 and more_observed < more_history and not has_images:
                asks.append(self._after_history(columns, members))
            else:
                asks += self._after_contexts(len(columns), members)
        return asks

    def _scored(self, m: int) -> Iterator[tuple[int, Pair]]:
        """Row number and reasoning of row m, and of its control."""
        yield m, self.pairs[m]
        if (control := self.controls[m]) is not None:
            yield len(self.pairs) + m, control

    def _after_history(self, columns: Sequence[tuple[Prompt, ...]], members: Sequence[int]) -> Ask:
        continuations, cells = [], []
        for m in members:
            for row, pair in self._scored(m):
                for j, (observation,) in enumerate(columns):
                    continuations.append(np.concatenate([observation.ids, pair.continuation]))
                    cells.append((row, j, len(observation.ids) + pair.num_opening))
        return Ask(ScoreRequest(self.kept[members[0]][0], continuations), cells)

    def _after_contexts(self, num_columns: int, members: Sequence[int]) -> list[Ask]:
        scored = [each for m in members for each in self._scored(m)]
        return [
            Ask(
                ScoreRequest(
                    self.context(members[0], j), [pair.continuation for _, pair in scored]
                ),
                [(row, j, pair.num_opening) for row, pair in scored],
            )
            for j in range(num_columns)
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
    turns, num_reasonings = _collect(groups, _newest)
    num_prompts = _fixed(num_prompts, turns, num_pairs)
    usable = _usable(turns, num_prompts, num_reasonings, "observation swap")
    quotas = _quotas(usable, num_pairs, rng)
    blocks = _Blocks("observation_swap", num_prompts)
    for t, seen in usable.items():
        blocks.fill(seen, quotas[t], rng)
    return blocks.swap_set(usable, num_reasonings, rng)


def episode_swap_pairs(
    groups: Sequence[Group],
    *,
    num_prompts: int | None = None,
    num_pairs: int = EPISODE_ROWS,
    seed: int = 0,
) -> SwapSet:
    """Turns of one environment, with the whole episodes of N tasks as columns.

    N is `num_prompts`, or as many tasks as there are, at most `EPISODE_PROMPTS`. A block has one
    episode of each task, and its rows are the reasonings of these. Turn numbers get equally many
    blocks; where there are more turn numbers than `num_pairs` allows, evenly spaced ones.
    """
    check_counts(num_pairs)
    rng = np.random.default_rng(seed)
    turns, num_reasonings = _collect(groups, _episode)
    num_prompts = min(_fixed(num_prompts, turns, num_pairs), EPISODE_PROMPTS, num_pairs)
    usable = _usable(turns, num_prompts, num_reasonings, "episode swap", by_task=True)
    num_blocks = max(1, num_pairs // num_prompts)
    places = np.linspace(0, len(usable) - 1, min(num_blocks, len(usable))).round().astype(int)
    chosen = {t: usable[t] for t in np.array(list(usable))[places].tolist()}
    blocks = _Blocks("episode_swap", num_prompts)
    each, more = divmod(num_blocks, len(chosen))
    for place, seen in enumerate(chosen.values()):
        for keys in _one_of_each_task(seen, each + (place < more), num_prompts, rng):
            blocks.add(seen, keys, num_prompts, rng)
    return blocks.swap_set(chosen, num_reasonings, rng)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A turn's prompt, cut into what stays and what is exchanged; pieces alternate."""

    kept: tuple[Prompt, ...]
    observations: tuple[Prompt, ...]

    @property
    def key(self) -> bytes:
        """Equal for equal observations."""
        return b"".join(observation.key for observation in self.observations)


def _newest(turns: Sequence[Turn], t: int, before: _Cut | None) -> _Cut | None:
    """The newest observation alone; None where it is not known where that begins."""
    start = turns[t].observation_start
    if start is None:
        return None
    history, observation = _split_prompt(turns[t], start)
    return _Cut((history,), (observation,))


def _episode(turns: Sequence[Turn], t: int, before: _Cut | None) -> _Cut | None:
    """All observations up to this turn; None unless the prompt goes on from the one before."""
    newest = _newest(turns, t, None)
    if newest is None or t == 0:
        return newest
    earlier, (history,) = turns[t - 1].prompt, newest.kept
    if before is None or not history.continues(earlier):
        return None
    reply = Prompt(history.ids[len(earlier.ids) :], history.images[len(earlier.images) :])
    return _Cut((*before.kept, reply), (*before.observations, *newest.observations))


def _split_prompt(turn: Turn, start: int) -> tuple[Prompt, Prompt]:
    """What stood before the newest observation, and the observation."""
    ids, images = turn.prompt.ids, turn.prompt.images
    num_earlier = len(images) - len(content_images(turn.seen)) if start else 0
    return Prompt(ids[:start], images[:num_earlier]), Prompt(ids[start:], images[num_earlier:])


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """A reasoning that answered an observation."""

    pair: Pair
    kept: tuple[Prompt, ...]
    task: bytes
    trajectory: int
    """Number of the trajectory among all."""


@dataclass(slots=True)
class _Seen:
    """One turn number: its distinct columns, and the reasonings that answered each."""

    columns: dict[bytes, tuple[Prompt, ...]] = field(default_factory=dict)
    """Observations by key."""
    answers: dict[bytes, list[_Answer]] = field(default_factory=dict)
    """By column; one that got no valid reasoning is missing here."""
    owners: dict[bytes, int] = field(default_factory=dict)
    """By column: the group that saw it first."""
    tasks: dict[bytes, bytes] = field(default_factory=dict)
    """By column: its task, the key of the first prompt."""

    @property
    def num_reasonings(self) -> int:
        return sum(map(len, self.answers.values()))

    def num_columns(self, *, by_task: bool) -> int:
        """Distinct columns; `by_task`: tasks that have one."""
        return len(set(self.tasks.values())) if by_task else len(self.columns)

    def is_enough(self, num_prompts: int, *, by_task: bool) -> bool:
        answered = {self.tasks[key] for key in self.answers} if by_task else self.answers
        has_answers = len(answered) >= min_with_reasoning(num_prompts)
        return has_answers and self.num_columns(by_task=by_task) >= num_prompts


def _collect(
    groups: Sequence[Group], cut: Callable[[Sequence[Turn], int, _Cut | None], _Cut | None]
) -> tuple[dict[int, _Seen], int]:
    """What was seen at each turn number, and the number of reasonings in all."""
    turns: dict[int, _Seen] = {}
    num_reasonings = 0
    members = ((group, i) for group in groups for i in range(len(group.trajectories)))
    for number, (group, index) in enumerate(members):
        trajectory = group.trajectories[index]
        found: _Cut | None = None
        for t in range(trajectory.num_turns):
            pair = make_pair(group.group_id, index, trajectory, t)
            num_reasonings += pair is not None
            found = cut(trajectory.turns, t, found)
            if found is None:
                continue
            seen, key = turns.setdefault(t, _Seen()), found.key
            task = trajectory.turns[0].prompt.key
            seen.columns.setdefault(key, found.observations)
            seen.owners.setdefault(key, group.group_id)
            seen.tasks.setdefault(key, task)
            if pair is not None:
                answer = _Answer(pair, found.kept, task, number)
                seen.answers.setdefault(key, []).append(answer)
    return dict(sorted(turns.items())), num_reasonings


def _fixed(num_prompts: int | None, turns: Mapping[int, _Seen], num_pairs: int) -> int:
    """N as given, else the distinct columns of the first turn number."""
    if num_prompts is not None:
        return num_prompts
    first = next(iter(turns.values()), _Seen())
    return max(2, min(len(first.columns), num_pairs))


def _usable(
    turns: Mapping[int, _Seen],
    num_prompts: int,
    num_reasonings: int,
    name: str,
    *,
    by_task: bool = False,
) -> dict[int, _Seen]:
    """Turn numbers with N columns and enough reasonings; an error where there are none."""
    usable = {t: seen for t, seen in turns.items() if seen.is_enough(num_prompts, by_task=by_task)}
    if usable:
        return usable
    if not turns and num_reasonings:
        raise TooFewPromptsError(
            f"{name} needs to know where the newest observation of a prompt begins, and this "
            f"recorder of turns did not say; set Turn.observation_start"
        )
    most = max((seen.num_columns(by_task=by_task) for seen in turns.values()), default=0)
    raise TooFewPromptsError(
        f"{name} needs a turn number with {num_prompts} distinct "
        f"{'tasks' if by_task else 'observations'}, at least {min_with_reasoning(num_prompts)} of "
        f"them with a reasoning, got at most {most} distinct ones; lower num_prompts or roll out "
        f"more groups"
    )


def _quotas(usable: Mapping[int, _Seen], num_pairs: int, rng: np.random.Generator) -> Counter[int]:
    """How many rows each turn number gets: trajectories in turn, each with one of its turns."""
    turns: dict[int, list[int]] = {}
    for t, seen in usable.items():
        for answer in chain.from_iterable(seen.answers.values()):
            turns.setdefault(answer.trajectory, []).append(t)
    orders = [[stack[i] for i in rng.permutation(len(stack))] for stack in turns.values()]
    visits = deal([orders[i] for i in rng.permutation(len(orders))])
    return Counter(visits[:num_pairs])


def _one_of_each_task(
    seen: _Seen, num_blocks: int, num_prompts: int, rng: np.random.Generator
) -> Iterator[list[bytes]]:
    """Columns of N tasks, those with a reasoning first; no column twice, tasks used least first."""
    answered = list(seen.answers)
    silent = [key for key in seen.columns if key not in seen.answers]
    stacks: dict[bytes, list[bytes]] = {}
    for keys in (silent, answered):  # taken from the end
        for i in rng.permutation(len(keys)):
            stacks.setdefault(seen.tasks[keys[i]], []).append(keys[i])
    order = dict(zip(stacks, rng.permutation(len(stacks)).tolist(), strict=True))
    used: Counter[bytes] = Counter()
    for _ in range(num_blocks):
        tasks = [task for task, stack in stacks.items() if stack]
        tasks.sort(key=lambda t: (stacks[t][-1] not in seen.answers, used[t], order[t]))
        num_answered = sum(stacks[task][-1] in seen.answers for task in tasks[:num_prompts])
        if len(tasks) < num_prompts or num_answered < min_with_reasoning(num_prompts):
            return
        used.update(tasks[:num_prompts])
        yield [stacks[task].pop() for task in tasks[:num_prompts]]


@dataclass(slots=True)
class _Blocks:
    """Blocks of N columns as they are drawn."""

    view: str
    num_prompts: int
    observations: list[tuple[tuple[Prompt, ...], ...]] = field(default_factory=list)
    owners: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[tuple[_Answer, int, int]] = field(default_factory=list)
    """Answer, block, column."""

    def fill(self, seen: _Seen, quota: int, rng: np.random.Generator) -> None:
        """Add up to `quota` rows of one turn number, spread evenly over columns.

        Columns fill a block of N; where its rows are fewer than the quota, the next N make another.
        A later block needs two rows, so that they can be permuted.
        """
        answered = list(seen.answers)
        silent = [key for key in seen.columns if key not in seen.answers]
        order = [
            *(answered[i] for i in rng.permutation(len(answered))),
            *(silent[i] for i in rng.permutation(len(silent))),
        ]
        for first in range(0, len(order) - self.num_prompts + 1, self.num_prompts):
            keys = order[first : first + self.num_prompts]
            num_answered = sum(key in seen.answers for key in keys)
            too_few = num_answered < min_with_reasoning(self.num_prompts)
            if too_few or quota < (2 if first else 1):
                return
            quota -= self.add(seen, keys, quota, rng)

    def add(self, seen: _Seen, keys: Sequence[bytes], quota: int, rng: np.random.Generator) -> int:
        """Add a block of these columns, with up to `quota` rows; returns how many."""
        columns = [j for j, key in enumerate(keys) if key in seen.answers]
        stacks = [
            [(seen.answers[keys[j]][i], j) for i in rng.permutation(len(seen.answers[keys[j]]))]
            for j in columns
        ]
        dealt = deal(stacks)[:quota]
        self.rows += [(answer, len(self.observations), j) for answer, j in dealt]
        self.observations.append(tuple(seen.columns[key] for key in keys))
        self.owners.append(tuple(seen.owners[key] for key in keys))
        return len(dealt)

    def swap_set(
        self, used: Mapping[int, _Seen], num_reasonings: int, rng: np.random.Generator
    ) -> SwapSet:
        answers, blocks, columns = zip(*self.rows, strict=True)
        pools = {t: list(chain.from_iterable(seen.answers.values())) for t, seen in used.items()}
        num_available = sum(map(len, pools.values()))
        return SwapSet(
            view=self.view,
            pairs=tuple(answer.pair for answer in answers),
            controls=tuple(_control(answer, pools[answer.pair.turn], rng) for answer in answers),
            kept=tuple(answer.kept for answer in answers),
            blocks=np.array(blocks, dtype=np.intp),
            columns=np.array(columns, dtype=np.intp),
            observations=tuple(self.observations),
            owners=tuple(self.owners),
            num_available=num_available,
            num_left_out=num_reasonings - num_available,
        )


def _control(answer: _Answer, pool: Sequence[_Answer], rng: np.random.Generator) -> Pair | None:
    """A reasoning of another task at the same turn number; None where there is none."""
    others = [other.pair for other in pool if other.task != answer.task]
    return others[rng.integers(len(others))] if others else None
