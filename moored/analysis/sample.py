"""A bounded, seeded draw from any number of rows: N prompts and M reasonings of each look.

A look is one step of one environment, or several stored steps pooled.
Prompts have a keyed digest; the N lowest of a step are kept. That is a uniform draw over distinct
prompts, whatever the order of rows, and takes the same prompts in every step that has them. Each
prompt keeps the reasonings with the lowest random numbers, as many as its share of M.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from moored.diagnostics.pairs import Pair, PairSet
from moored.errors import TooFewPromptsError
from moored.files.records import BadRow, PromptLike, Record, Skipped, usable
from moored.types import Prompt

if TYPE_CHECKING:
    from moored.analysis.scorers import Encoder

MAX_REWARD_GROUPS = 4096
"""Most groups of a step whose rewards are kept; of more, a uniform draw."""

ENOUGH_PROMPTS = 8
"""Prompts of a look below which steps are pooled: the batch of the paper."""

TAIL = 32
"""Kept after a reasoning: where its last token ends depends on what follows."""

V = TypeVar("V")


class LowestKeys(Generic[V]):
    """Values of the `size` lowest keys ever seen; a key that was dropped never comes back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: dict[bytes, V] = {}
        self._highest_first: list[tuple[int, bytes]] = []

    def slot(self, key: bytes, new: Callable[[], V]) -> V | None:
        """The value of a key, made by `new` on first sight; None when the key is too high."""
        if key in self.values:
            return self.values[key]
        entry = (-int.from_bytes(key), key)
        if len(self.values) == self.size:
            if entry < self._highest_first[0]:
                return None
            del self.values[heapq.heapreplace(self._highest_first, entry)[1]]
        else:
            heapq.heappush(self._highest_first, entry)
        self.values[key] = new()
        return self.values[key]


@dataclass(frozen=True, slots=True, eq=False)
class Reasoning:
    """Where reasoning stands in a reply, which is kept up to `TAIL` beyond it."""

    content: str | np.ndarray
    start: int
    stop: int
    text: str | None
    step: int | None = None
    reward: float = math.nan


@dataclass(slots=True)
class DrawnPrompt:
    prompt: PromptLike
    reasonings: list[tuple[float, Reasoning]] = field(default_factory=list)
    """With their random numbers, lowest first."""


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Rewards of a step; the spread is inside groups, since that is what training learns from."""

    mean: float
    std_in_group: float | None
    """Root of the mean within-group variance; None when no group has two rewards."""
    zero_spread_share: float | None
    """Share of the groups with two rewards whose rewards are all equal, up to rounding."""
    num_groups: int
    num_compared: int = 0
    """Groups with two rewards or more, whose share and spread these are."""


@dataclass(slots=True)
class StepDraw:
    """What is kept of one step, or of several pooled, of one environment."""

    steps: tuple[int, ...]
    """In order; empty where the file does not number steps."""
    num_prompts: int
    num_pairs: int
    num_rows: int = 0
    num_without_reasoning: int = 0
    num_empty: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0
    prompts: LowestKeys[DrawnPrompt] = field(init=False)
    groups: LowestKeys[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = LowestKeys(self.num_prompts)
        self.groups = LowestKeys(MAX_REWARD_GROUPS)

    @property
    def step(self) -> int | None:
        """The last step."""
        return self.steps[-1] if self.steps else None

    @property
    def label(self) -> str:
        """The steps that it really holds: "5", or "1–8"."""
        return label_of(self.steps)

    def add(self, record: Record, seed: int, rng: random.Random) -> None:
        """Take in one row."""
        self.num_rows += 1
        key = _digest(record.prompt, seed)
        self._add_reward(record, key)
        if record.think is None:
            self.num_without_reasoning += 1
        elif record.is_empty:
            self.num_empty += 1
        else:
            self._add_reasoning(record, key, rng.random())

    def _add_reasoning(self, record: Record, key: bytes, number: float) -> None:
        drawn = self.prompts.slot(key, lambda: DrawnPrompt(record.prompt))
        if drawn is None:
            return
        share = self._share
        if len(drawn.reasonings) >= share and number > drawn.reasonings[share - 1][0]:
            return
        assert record.think is not None
        start, stop = record.think
        reasoning = Reasoning(
            content=record.response[: stop + TAIL],
            start=start,
            stop=stop,
            text=record.text,
            step=record.step,
            reward=record.reward,
        )
        drawn.reasonings.append((number, reasoning))
        drawn.reasonings.sort(key=lambda item: item[0])
        del drawn.reasonings[share:]

    @property
    def _share(self) -> int:
        """Reasonings a prompt may keep; falls as prompts come in."""
        return -(-self.num_pairs // max(len(self.prompts.values), 1))

    def chosen(self, num_prompts: int) -> list[DrawnPrompt]:
        """The lowest prompts, each with its share of reasonings."""
        lowest = sorted(self.prompts.values.items())[:num_prompts]
        return [DrawnPrompt(p.prompt, p.reasonings[: self._share]) for _, p in lowest]

    def _add_reward(self, record: Record, prompt_key: bytes) -> None:
        reward = record.reward
        if math.isnan(reward):
            return
        self.reward_sum += reward
        self.num_rewards += 1
        name = prompt_key if record.group is None else record.group
        key = hashlib.blake2b(repr((record.step, name)).encode(), digest_size=8).digest()
        moments = self.groups.slot(key, lambda: [0.0, 0.0, 0.0])
        if moments is not None:
            _update(moments, reward)

    def rewards(self) -> RewardStats | None:
        """None when no row has a reward."""
        if not self.num_rewards:
            return None
        known = [moments for moments in self.groups.values.values() if moments[0] > 1]
        variances = [m2 / n for n, _, m2 in known]
        return RewardStats(
            mean=self.reward_sum / self.num_rewards,
            std_in_group=float(np.sqrt(np.mean(variances))) if known else None,
            zero_spread_share=float(np.mean([_is_flat(*each) for each in known]))
            if known
            else None,
            num_groups=len(self.groups.values),
            num_compared=len(known),
        )


def label_of(steps: Sequence[int]) -> str:
    """Names the steps of a look: "5", "1–8", or "all" where steps have no numbers."""
    if not steps:
        return "all"
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def pool(draws: Sequence[StepDraw]) -> StepDraw:
    """What one draw from all the rows together would have kept."""
    if len(draws) == 1:
        return draws[0]
    first = draws[0]
    steps = tuple(step for drawn in draws for step in drawn.steps)
    pooled = StepDraw(steps, first.num_prompts, first.num_pairs)
    for drawn in draws:
        pooled.num_rows += drawn.num_rows
        pooled.num_without_reasoning += drawn.num_without_reasoning
        pooled.num_empty += drawn.num_empty
        pooled.reward_sum += drawn.reward_sum
        pooled.num_rewards += drawn.num_rewards
        for key, prompt in drawn.prompts.values.items():
            slot = pooled.prompts.slot(key, lambda prompt=prompt: DrawnPrompt(prompt.prompt))
            if slot is not None:
                both = (*slot.reasonings, *prompt.reasonings)
                slot.reasonings = sorted(both, key=lambda item: item[0])
        for key, moments in drawn.groups.values.items():
            # Groups of two steps have different keys.
            pooled.groups.slot(key, lambda moments=moments: moments)
    return pooled


@dataclass(frozen=True, slots=True)
class Draw:
    """The looks of every environment, in order, and how many rows were skipped."""

    series: Mapping[str | None, tuple[StepDraw, ...]]
    """By environment; None where the files name none."""
    num_bad: int
    num_torn: int

    @property
    def looks(self) -> list[StepDraw]:
        """Of all environments."""
        return [drawn for series in self.series.values() for drawn in series]

    def pooled(self, window: int | None) -> Draw:
        """`window` stored steps in each look.

        None: as few as it takes for looks to hold `ENOUGH_PROMPTS` prompts.
        """
        series = {env: _windows(draws, window) for env, draws in self.series.items()}
        return replace(self, series=series)


def _windows(draws: Sequence[StepDraw], window: int | None) -> tuple[StepDraw, ...]:
    size = _fewest_steps(draws) if window is None else window
    return tuple(pool(draws[i : i + size]) for i in range(0, len(draws), size))


def _fewest_steps(draws: Sequence[StepDraw]) -> int:
    """Steps to pool for looks to hold `ENOUGH_PROMPTS`, or else as many as they can."""
    keys = [drawn.prompts.values.keys() for drawn in draws]
    num_prompts = draws[0].num_prompts
    most = min(ENOUGH_PROMPTS, num_prompts, len(set().union(*keys)))
    best, found = 1, 0
    for size in _window_sizes(len(draws)):
        windows = (set().union(*keys[i : i + size]) for i in range(0, len(keys), size))
        usual = statistics.median_low([min(len(window), num_prompts) for window in windows])
        best, found = (size, usual) if usual > found else (best, found)
        if found >= most:
            break
    return best


def _window_sizes(count: int) -> Iterator[int]:
    """1, 2, 3, …, and larger ones further and further apart, up to all: each takes a pass."""
    size = 1
    while size < count:
        yield size
        size += max(1, size // 8)
    yield count


def draw(
    rows: Iterable[Record | BadRow],
    *,
    num_prompts: int,
    num_pairs: int,
    skip_bad: bool = False,
    seed: int = 0,
) -> Draw:
    """Go through all rows once. Memory grows with the number of steps, not with that of rows."""
    rng = random.Random(seed)
    drawn: dict[tuple[str | None, int | None], StepDraw] = {}
    skipped = Skipped()
    for row in usable(rows, skipped, skip_bad=skip_bad):
        place = (row.env, row.step)
        if place not in drawn:
            steps = () if row.step is None else (row.step,)
            drawn[place] = StepDraw(steps, num_prompts, num_pairs)
        drawn[place].add(row, seed, rng)
    series: dict[str | None, list[StepDraw]] = {}
    for env, step in sorted(drawn, key=lambda place: (place[0] or "", place[1] or 0)):
        series.setdefault(env, []).append(drawn[env, step])
    ordered = {env: tuple(draws) for env, draws in series.items()}
    return Draw(ordered, skipped.num_bad, len(skipped.torn))


def encode_step(
    step: StepDraw, encoder: Encoder, *, num_prompts: int, num_pairs: int, max_tokens: int | None
) -> PairSet:
    """The pairs of one step: `num_prompts` prompts, reasonings dealt out in turn."""
    chosen = step.chosen(num_prompts)
    if len(chosen) < num_prompts:
        raise TooFewPromptsError(too_few_prompts(step, len(chosen), num_prompts))
    prompts = [Prompt(encoder.prompt(drawn.prompt)) for drawn in chosen]
    stacks = [
        [(prompt, reasoning) for _, reasoning in drawn.reasonings]
        for prompt, drawn in zip(prompts, chosen, strict=True)
    ]
    dealt = [x for x in chain.from_iterable(zip_longest(*stacks)) if x is not None][:num_pairs]
    encoder.check_text([reasoning for _, reasoning in dealt])
    pairs: list[Pair] = []
    # Policies of two steps differ, and so do their replies to the same prompt.
    groups: dict[tuple[int | None, bytes], int] = {}
    for prompt, reasoning in dealt:
        ids, num_opening = encoder.reasoning(reasoning)
        ids = ids[: None if max_tokens is None else num_opening + max_tokens]
        if len(ids) > num_opening:
            group = groups.setdefault((reasoning.step, prompt.key), len(groups))
            pairs.append(Pair(prompt, ids, num_opening, group, len(pairs), 0, reasoning.reward))
    return _pair_set(pairs, step)


def _pair_set(pairs: list[Pair], step: StepDraw) -> PairSet:
    by_key: dict[bytes, Prompt] = {}
    for pair in pairs:
        by_key.setdefault(pair.prompt.key, pair.prompt)
    places = {key: place for place, key in enumerate(by_key)}
    if len(places) < 2:
        raise TooFewPromptsError(too_few_prompts(step, len(places), 2))
    num_empty = step.num_without_reasoning + step.num_empty
    return PairSet(
        view="file",
        pairs=tuple(pairs),
        prompts=tuple(by_key.values()),
        columns=np.array([places[pair.prompt.key] for pair in pairs], dtype=np.intp),
        num_available=step.num_rows - num_empty,
        num_empty=num_empty,
    )


def too_few_prompts(step: StepDraw, found: int, wanted: int) -> str:
    """Why a step cannot be measured."""
    text = f"needs {wanted} distinct prompts with a reasoning, got {found} in {step.num_rows} rows"
    if step.num_without_reasoning or step.num_empty:
        text += f" ({step.num_without_reasoning} without tags, {step.num_empty} empty)"
    return text


def _digest(prompt: PromptLike, seed: int) -> bytes:
    if isinstance(prompt, np.ndarray):
        raw = b"i" + np.ascontiguousarray(prompt, dtype=np.int64).tobytes()
    elif isinstance(prompt, str):
        raw = b"t" + prompt.encode("utf-8", "surrogatepass")
    else:
        raw = b"c" + json.dumps(prompt, sort_keys=True, default=str).encode()
    key = (seed % (1 << 64)).to_bytes(8)
    return hashlib.blake2b(raw, digest_size=16, key=key).digest()


def _is_flat(count: float, mean: float, squares: float) -> bool:
    """Rewards are equal up to rounding: trainers sum them in float32."""
    return math.sqrt(squares / count) <= max(1e-10, 1e-6 * abs(mean))


def _update(moments: list[float], value: float) -> None:
    """Welford: count, mean, sum of squared distances."""
    moments[0] += 1
    distance = value - moments[1]
    moments[1] += distance / moments[0]
    moments[2] += distance * (value - moments[1])
