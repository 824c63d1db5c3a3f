"""Rollout files of any trainer, measured as training measures its groups: by `CollapseMonitor`.

A look is one step of one environment, or several stored steps pooled. Memory grows with the number
of looks, not with that of rows. Prompts have a keyed digest; the N lowest of a step are kept: a
uniform draw over distinct prompts, whatever the order of rows, which takes the same prompts in
every step that has them. Each prompt keeps the episodes with the lowest random numbers, as many as
its share of M.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from moored.analysis.diagnosis import (
    Closeup,
    Diagnosis,
    Look,
    RewardStats,
    Series,
    TurnLook,
    label_of,
)
from moored.analysis.scorers import Encoder, Scorer, Scorers
from moored.analysis.stored import SeriesReader
from moored.diagnostics.information import Likelihood
from moored.diagnostics.look import Measurement
from moored.diagnostics.monitor import CollapseMonitor, View
from moored.diagnostics.pairs import ScoreFn
from moored.errors import ConfigError, TooFewPromptsError
from moored.files.formats import read_records
from moored.files.records import BadRow, Exchange, PromptLike, ReadOptions, Record, Skipped, usable
from moored.integrations.completions import group_episodes, make_turn
from moored.types import Group, Prompt, ScoreRequest, Turn

VIEWS: tuple[View, ...] = ("first_turn", "observation_swap", "episode_swap")
MOST_PROMPTS = 16
ENOUGH_PROMPTS = 8
"""Prompts of a look below which steps are pooled: the batch of the paper."""
MAX_REWARD_GROUPS = 4096
"""Most groups of a step whose rewards are kept; of more, a uniform draw."""
TAIL = 32
"""Kept after a reasoning: where its last token ends depends on what follows."""
PROBE_PAIRS = 4
TELL_EVERY = 1000
NAMELESS = "rollouts"
"""Stands for the environment where files name none."""
NOTHING = "nothing can be measured: "

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions:
    """How much is drawn for each look, and how it is measured."""

    num_prompts: int | None = None
    """N; None: what the median look has, `MOST_PROMPTS` at most."""
    num_pairs: int = 64
    """M."""
    window: int | None = None
    """Stored steps in a look; None: as few as it takes to have enough prompts."""
    skip_bad: bool = False
    max_tokens: int | None = None
    """Most tokens scored of each reasoning."""
    draws: int = 1000
    """For intervals and p-values."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_pairs < self.num_prompts:
            raise ConfigError(
                f"--pairs must be at least --prompts, got {self.num_pairs} and {self.num_prompts}"
            )

    @property
    def most_prompts(self) -> int:
        return self.num_prompts or min(MOST_PROMPTS, self.num_pairs)


class LowestKeys(Generic[V]):
    """Values of the `size` lowest keys ever seen; a key that was dropped never comes back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: dict[bytes, V] = {}
        self._highest = b""

    def slot(self, key: bytes, new: Callable[[], V]) -> V | None:
        """The value of a key, made by `new` on first sight; None when the key is too high."""
        if key not in self.values:
            if len(self.values) == self.size:
                if key > self._highest:
                    return None
                del self.values[self._highest]
            self.values[key] = new()
            self._highest = max(self.values) if len(self.values) == self.size else b""
        return self.values[key]


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The turns of a row, their replies cut after the reasoning."""

    number: float
    """Random: the lowest are kept."""
    step: int | None
    reward: float
    turns: tuple[Exchange, ...]


@dataclass(slots=True)
class LookDraw:
    """What is kept of one step, or of several pooled, of one environment."""

    steps: tuple[int, ...]
    """In order; empty where the file does not number steps."""
    num_prompts: int
    num_pairs: int
    num_rows: int = 0
    """Replies."""
    num_without_reasoning: int = 0
    num_empty: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0
    prompts: LowestKeys[list[Episode]] = field(init=False)
    groups: LowestKeys[list[float]] = field(init=False)
    """Rewards as count, mean and sum of squared distances."""

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

    @property
    def valid_thinking_rate(self) -> float:
        return 1.0 - (self.num_without_reasoning + self.num_empty) / self.num_rows

    def add(self, record: Record, seed: int, rng: random.Random) -> None:
        """Take in one row."""
        turns, key = record.turns, _digest(record.prompt, seed)
        num_missing = sum(turn.think is None for turn in turns)
        num_empty = sum(turn.is_empty for turn in turns)
        self.num_rows += len(turns)
        self.num_without_reasoning += num_missing
        self.num_empty += num_empty
        self._add_reward(record, key)
        if num_missing + num_empty < len(turns):
            self._add_episode(record, key, rng.random())

    def _add_episode(self, record: Record, key: bytes, number: float) -> None:
        kept, share = self.prompts.slot(key, list), self._share
        if kept is None or (len(kept) >= share and number > kept[share - 1].number):
            return
        kept.append(Episode(number, record.step, record.reward, _compact(record.turns)))
        kept.sort(key=lambda episode: episode.number)
        del kept[share:]

    @property
    def _share(self) -> int:
        """Episodes a prompt may keep; falls as prompts come in."""
        return -(-self.num_pairs // max(len(self.prompts.values), 1))

    def chosen(self, num_prompts: int) -> list[Episode]:
        """Those of the lowest prompts, each with its share."""
        lowest = sorted(self.prompts.values.items())[:num_prompts]
        return [episode for _, kept in lowest for episode in kept[: self._share]]

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
            # Welford.
            moments[0] += 1
            distance = reward - moments[1]
            moments[1] += distance / moments[0]
            moments[2] += distance * (reward - moments[1])

    def rewards(self) -> RewardStats | None:
        """None when no row has a reward."""
        if not self.num_rewards:
            return None
        known = [moments for moments in self.groups.values.values() if moments[0] > 1]
        variances = [m2 / n for n, _, m2 in known]
        flat = [_is_flat(*each) for each in known]
        return RewardStats(
            mean=self.reward_sum / self.num_rewards,
            std_in_group=float(np.sqrt(np.mean(variances))) if known else None,
            zero_spread_share=float(np.mean(flat)) if known else None,
            num_groups=len(self.groups.values),
            num_compared=len(known),
        )

    def merge(self, other: LookDraw) -> None:
        """Keep what one draw from the rows of both would have kept."""
        for name in ("num_rows", "num_without_reasoning", "num_empty", "reward_sum", "num_rewards"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, episodes in other.prompts.values.items():
            kept = self.prompts.slot(key, list)
            if kept is not None:
                kept += episodes
                kept.sort(key=lambda episode: episode.number)
        for key, moments in other.groups.values.items():
            # Groups of two steps have different keys.
            self.groups.slot(key, lambda moments=moments: moments)


def _compact(turns: Sequence[Exchange]) -> tuple[Exchange, ...]:
    """Replies cut after their reasoning, and ids of a prompt as the beginning of the last one."""
    last, found = turns[-1].prompt, []
    for turn in turns:
        prompt, stop = turn.prompt, 0 if turn.think is None else turn.think[1] + TAIL
        if isinstance(prompt, np.ndarray) and isinstance(last, np.ndarray):
            begun = last[: len(prompt)]
            prompt = begun if np.array_equal(begun, prompt) else prompt
        response = turn.response[:stop]
        response = response.copy() if isinstance(response, np.ndarray) else response
        found.append(replace(turn, prompt=prompt, response=response))
    return tuple(found)


def _is_flat(count: float, mean: float, squares: float) -> bool:
    """Rewards are equal up to rounding: trainers sum them in float32."""
    return math.sqrt(squares / count) <= max(1e-10, 1e-6 * abs(mean))


def _digest(prompt: PromptLike, seed: int) -> bytes:
    if isinstance(prompt, np.ndarray):
        raw = b"i" + np.ascontiguousarray(prompt, dtype=np.int64).tobytes()
    elif isinstance(prompt, str):
        raw = b"t" + prompt.encode("utf-8", "surrogatepass")
    else:
        raw = b"c" + json.dumps(prompt, sort_keys=True, default=str).encode()
    key = (seed % (1 << 64)).to_bytes(8)
    return hashlib.blake2b(raw, digest_size=16, key=key).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The looks of every environment, in order, and how many rows were skipped."""

    series: Mapping[str | None, Sequence[LookDraw]]
    """By environment; None where the files name none."""
    num_bad: int
    num_torn: int
    num_turns: int
    """Of the longest episode."""

    @property
    def looks(self) -> list[LookDraw]:
        """Of all environments."""
        return [look for series in self.series.values() for look in series]


def read_files(
    files: Iterable[Path], reading: ReadOptions, tell: Callable[[str], None] = lambda _: None
) -> Iterator[Record | BadRow]:
    """The rows of all files; `tell` is called with the progress."""
    num_rows = 0
    for file in files:
        for row in read_records(file, reading):
            num_rows += 1
            if num_rows % TELL_EVERY == 0:
                tell(f"reading {file.name}, {num_rows:,} rows")
            yield row


def draw(rows: Iterable[Record | BadRow], options: LookOptions) -> Draw:
    """Go through all rows once."""
    rng = random.Random(options.seed)
    drawn: dict[tuple[str | None, int | None], LookDraw] = {}
    skipped, num_turns = Skipped(), 0
    for row in usable(rows, skipped, skip_bad=options.skip_bad):
        place = (row.env, row.step)
        if place not in drawn:
            steps = () if row.step is None else (row.step,)
            drawn[place] = LookDraw(steps, options.most_prompts, options.num_pairs)
        drawn[place].add(row, options.seed, rng)
        num_turns = max(num_turns, len(row.turns))
    series: dict[str | None, list[LookDraw]] = {}
    for env, step in sorted(drawn, key=lambda place: (place[0] or "", place[1] or 0)):
        series.setdefault(env, []).append(drawn[env, step])
    pooled = {env: _windows(looks, options.window) for env, looks in series.items()}
    return Draw(
        series=pooled, num_bad=skipped.num_bad, num_torn=len(skipped.torn), num_turns=num_turns
    )


def _windows(looks: Sequence[LookDraw], window: int | None) -> list[LookDraw]:
    size = _fewest_steps(looks) if window is None else window
    return [_pool(looks[i : i + size]) for i in range(0, len(looks), size)]


def _pool(looks: Sequence[LookDraw]) -> LookDraw:
    if len(looks) == 1:
        return looks[0]
    steps = tuple(step for look in looks for step in look.steps)
    pooled = LookDraw(steps, looks[0].num_prompts, looks[0].num_pairs)
    for look in looks:
        pooled.merge(look)
    return pooled


def _fewest_steps(looks: Sequence[LookDraw]) -> int:
    """Steps to pool for looks to hold `ENOUGH_PROMPTS`, or else as many as they can."""
    keys = [look.prompts.values.keys() for look in looks]
    num_prompts = looks[0].num_prompts
    most = min(ENOUGH_PROMPTS, num_prompts, len(set().union(*keys)))
    best, found, size = 1, 0, 1
    while found < most:
        windows = (set().union(*keys[i : i + size]) for i in range(0, len(keys), size))
        usual = statistics.median_low([min(len(window), num_prompts) for window in windows])
        best, found = (size, usual) if usual > found else (best, found)
        if size == len(looks):
            break
        # Further and further apart: each takes a pass.
        size = min(size + max(1, size // 8), len(looks))
    return best


def groups_of(
    look: LookDraw, encoder: Encoder, num_prompts: int, max_tokens: int | None = None
) -> list[Group]:
    """The groups a monitor measures: one for each prompt of each step."""
    episodes = look.chosen(num_prompts)
    encoder.check_text([turn for episode in episodes for turn in episode.turns])
    by_step: dict[int | None, list[tuple[Prompt, tuple[Turn, ...]]]] = {}
    for episode in episodes:
        turns = _encode(episode, encoder, max_tokens)
        by_step.setdefault(episode.step, []).append((turns[0].prompt, turns))
    groups: list[Group] = []
    for found in by_step.values():
        groups += group_episodes(NAMELESS, found, first_id=len(groups))
    return groups


def _encode(episode: Episode, encoder: Encoder, max_tokens: int | None) -> tuple[Turn, ...]:
    turns = []
    for turn, (prompt, start) in zip(episode.turns, encoder.prompts(episode.turns), strict=True):
        ids, num_opening = encoder.reasoning(turn)
        ids = ids[: None if max_tokens is None else num_opening + max_tokens]
        turns.append(make_turn(prompt, ids, (min(num_opening, len(ids)), len(ids)), start))
    # A policy is that of its step: replies of two steps to one prompt are not compared.
    version = 0 if episode.step is None else episode.step
    turns = [replace(turn, policy_version=version) for turn in turns]
    turns[-1] = replace(turns[-1], reward=episode.reward)
    return tuple(turns)


@dataclass(slots=True)
class Meter:
    """Counts what is scored; requests go one by one, so that progress can be shown."""

    on_request: Callable[[], None] = lambda: None
    token_forwards: int = 0
    num_requests: int = 0
    first: ScoreRequest | None = None

    def score(self, scorer: Scorer) -> ScoreFn:
        def scored(requests: Sequence[ScoreRequest]) -> list[Sequence[np.ndarray]]:
            found: list[Sequence[np.ndarray]] = []
            for request in requests:
                scorer.check_fits(request)
                self.token_forwards += scorer.token_forwards(request)
                self.num_requests += 1
                self.first = self.first or request
                found += scorer.score([request])
                self.on_request()
            return found

        return scored


def plan(drawn: Draw, scorer: Scorer, options: LookOptions, *, by_turn: bool = False) -> Meter:
    """What scoring will take: the same measurement, with a score function that only counts."""
    zeros = replace(
        scorer, score=lambda found: [[np.zeros(len(ids)) for ids in found[0].continuations]]
    )
    meter = Meter()
    few_draws = replace(options, draws=0)
    diagnose(drawn, Scorers.single(zeros), few_draws, meter=meter, by_turn=by_turn)
    return meter


def predict_seconds(planned: Meter, scorer: Scorer) -> float:
    """From a few reasonings under one prompt, timed after a warm-up."""
    assert planned.first is not None
    few = replace(planned.first, continuations=planned.first.continuations[:PROBE_PAIRS])
    scorer.score([replace(few, continuations=few.continuations[:1])])
    start = time.perf_counter()
    scorer.score([few])
    elapsed_s = time.perf_counter() - start
    return elapsed_s * planned.token_forwards / scorer.token_forwards(few)


def diagnose(
    drawn: Draw,
    scorers: Scorers,
    options: LookOptions,
    *,
    meter: Meter | None = None,
    by_turn: bool = False,
    view: str | None = None,
    closeups: bool = False,
) -> Diagnosis:
    """Measure all looks, oldest first; what cannot be measured is skipped and named.

    An environment without a look that can be measured is named, unless it is the only one. `view`
    is what to call the only turn of episodes that were cut to one.
    """
    if not drawn.series:
        raise TooFewPromptsError(
            f"the files hold no rows that can be used ({drawn.num_bad + drawn.num_torn} bad)"
        )
    start, meter = time.perf_counter(), meter or Meter()
    found: list[tuple[Series, list[Closeup]]] = []
    refusals: dict[str, TooFewPromptsError] = {}
    for env, looks in drawn.series.items():
        try:
            series, shown = _measure(looks, scorers, options, meter, by_turn=by_turn)
        except TooFewPromptsError as error:
            refusals[env or "the rest"] = error
        else:
            found.append((replace(series, env=env, view=view or series.view), shown))
    if not found:
        raise next(iter(refusals.values()))
    diagnosis = Diagnosis(
        series=tuple(series for series, _ in found),
        unmeasured={env: str(error).removeprefix(NOTHING) for env, error in refusals.items()},
        source=f"scored with {_models([look for series, _ in found for look in series.looks])}",
        temperature=scorers.temperature,
        token_forwards=meter.token_forwards,
        num_bad_rows=drawn.num_bad,
        num_torn_rows=drawn.num_torn,
        seconds=time.perf_counter() - start,
    )
    shown = found[diagnosis.series.index(diagnosis.worst)][1]
    return diagnosis.with_closeups(shown if closeups else ())


def _measure(
    looks: Sequence[LookDraw],
    scorers: Scorers,
    options: LookOptions,
    meter: Meter,
    *,
    by_turn: bool,
) -> tuple[Series, list[Closeup]]:
    """The looks of one environment, and close-ups of the first and the last."""
    num_prompts = _choose_num_prompts(looks, options.num_prompts)
    monitor = CollapseMonitor(
        score=lambda requests: [],
        views=VIEWS,
        num_pairs=options.num_pairs,
        num_prompts=num_prompts,
        bootstrap=options.draws,
        permutations=options.draws,
        seed=options.seed,
    )
    reader = SeriesReader(NAMELESS, is_one=True, ema_decay=monitor.ema_decay, where="a look")
    closeups: list[Closeup] = []
    groups: list[Group] = []
    for look in looks:
        if len(look.prompts.values) < num_prompts:
            reader.skipped[look.label] = _too_few_prompts(look, num_prompts)
            continue
        scorer = scorers.at(look.step)
        measured = groups_of(look, scorer.encoder, num_prompts, options.max_tokens)
        monitor.score = meter.score(scorer)
        found = monitor.measure(look.step or 0, measured)
        away = scorers.steps_away(look.step)
        entry = found.environments[NAMELESS].to_dict()
        facts = {"steps": look.steps, "model": scorer.name, "steps_away": away}
        record = {"step": found.step, **found.to_dict()}
        if reader.add(record, entry, look.rewards(), **facts):
            groups = measured
            reader.looks[-1] = replace(
                reader.looks[-1],
                num_rows=look.num_rows,
                valid_thinking_rate=look.valid_thinking_rate,
                reasoning_tokens_mean=reader.looks[-1].report.mean_length,
            )
            if "first_turn" in found.pairs:
                closeups = [*closeups[:1], _closeup(look, found, scorer)]
    if not reader.looks:
        raise TooFewPromptsError(f"{NOTHING}{next(iter(reader.skipped.values()))}")
    series = replace(reader.finish(), unmeasured_since=None)
    return _with_turns(series, monitor, groups) if by_turn else series, closeups


def _with_turns(series: Series, monitor: CollapseMonitor, groups: Sequence[Group]) -> Series:
    """Every turn position of the last look; each costs about as much as its first turns."""
    assert isinstance(monitor.num_prompts, int)
    num_pairs = math.isqrt(monitor.num_prompts * monitor.num_pairs)
    positions = replace(monitor, views=("positions",), num_pairs=num_pairs)
    found = positions.measure(series.looks[-1].step or 0, groups)
    number = {name: int(name.removeprefix("turn_")) for name in (*found.reports, *found.skipped)}
    turns = [TurnLook(turn=number[name], report=each) for name, each in found.reports.items()]
    skipped = {number[name]: why for name, why in found.skipped.items()}
    return replace(series, turns=tuple(turns), skipped_turns=skipped)


def _choose_num_prompts(looks: Sequence[LookDraw], num_prompts: int | None) -> int:
    """N of every look: what was asked for, else what the median look has; raises if none has it."""
    counts = [len(look.prompts.values) for look in looks]
    wanted = num_prompts or max(2, statistics.median_low(counts))
    if max(counts) >= wanted:
        return wanted
    num_rows = sum(look.num_rows for look in looks)
    if num_rows == sum(look.num_without_reasoning for look in looks):
        raise TooFewPromptsError(
            f"no response holds reasoning tags ({num_rows} rows); name yours with --tags OPEN "
            f"CLOSE, take another turn of dialogues with --turn, or measure whole responses: "
            f"--whole"
        )
    best = max(looks, key=lambda look: len(look.prompts.values))
    where = "" if best.step is None else f"step {best.label} "
    num_all = len({key for look in looks for key in look.prompts.values})
    remedy = "; pool steps with --window, or lower --prompts" if len(looks) > 1 else ""
    if num_all < 2:
        remedy = "; a reasoning is compared with those for other prompts: give rollouts of several"
    raise TooFewPromptsError(f"{NOTHING}{where}{_too_few_prompts(best, wanted)}{remedy}")


def _too_few_prompts(look: LookDraw, wanted: int) -> str:
    """Why a look cannot be measured."""
    found = len(look.prompts.values)
    text = f"needs {wanted} distinct prompts with a reasoning, got {found} in {look.num_rows} rows"
    if look.num_without_reasoning or look.num_empty:
        text += f" ({look.num_without_reasoning} without tags, {look.num_empty} empty)"
    return text


def _models(looks: Sequence[Look]) -> str:
    """Which model scored which steps: "nano", or "checkpoint 20 (steps 20, 25), …"."""
    steps: dict[str, list[str]] = {}
    for look in sorted(looks, key=lambda look: look.step or 0):
        labels = steps.setdefault(look.model, [])
        labels += [look.label] if look.label not in labels else []
    if len(steps) == 1:
        return next(iter(steps))
    parts = []
    for model, labels in steps.items():
        shown = f"steps {labels[0]} to {labels[-1]}" if len(labels) > 1 else f"step {labels[0]}"
        parts.append(f"{model} ({shown})")
    return ", ".join(parts)


def _closeup(look: LookDraw, found: Measurement, scorer: Scorer) -> Closeup:
    text, pairs, scores = scorer.encoder.text, found.pairs["first_turn"], found.scores["first_turn"]
    return Closeup(
        name="All scores" if look.step is None else f"Step {look.label}",
        prompts=tuple(text(prompt.ids) for prompt in pairs.prompts),
        reasonings=tuple(text(pair.continuation[pair.num_opening :]) for pair in pairs.pairs),
        token=Likelihood.of(scores.logp_MN, scores.columns_M),
    )
