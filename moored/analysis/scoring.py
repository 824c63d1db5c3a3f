"""Cross-score every drawn look with a model, and say what it shows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from moored.analysis.diagnosis import ONE_TURN, Closeup, Diagnosis, Look, Series, TurnLook
from moored.analysis.sample import Draw, StepDraw, encode_step, too_few_prompts
from moored.analysis.scorers import Scorer, Scorers
from moored.diagnostics.information import Likelihood, information
from moored.diagnostics.pairs import PairSet, ScoreFn, cross_score
from moored.diagnostics.report import CollapseReport
from moored.diagnostics.watch import CollapseWatch
from moored.diagnostics.worth import worth_of
from moored.errors import MooredError, TooFewPromptsError
from moored.types import ScoreRequest

PROBE_PAIRS = 4
MOST_TURNS = 10
"""Most turn positions that are measured; each costs as much as a look."""
NOTHING = "nothing can be measured: "


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLook:
    draw: StepDraw
    pairs: PairSet


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSeries:
    """The looks of one environment that will be scored."""

    env: str | None
    looks: tuple[PlannedLook, ...]
    skipped: Mapping[str, str]
    """Steps -> why they cannot be measured."""
    num_prompts: int
    turns: Mapping[int, PairSet] = field(default_factory=dict)
    """Other turn position -> its pairs in the last look."""
    skipped_turns: Mapping[int, str] = field(default_factory=dict)
    """Turn position -> why it cannot be measured."""

    @property
    def pair_sets(self) -> list[PairSet]:
        return [*(look.pairs for look in self.looks), *self.turns.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be scored, and what that costs."""

    series: tuple[PlannedSeries, ...]
    token_forwards: int
    turn: int = 1
    """Turn position that the looks are of."""
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    """Environments without a look that can be measured, and why."""

    @property
    def num_looks(self) -> int:
        return sum(len(series.looks) for series in self.series)

    @property
    def num_turns(self) -> int:
        return sum(len(series.turns) for series in self.series)

    @property
    def pair_sets(self) -> list[PairSet]:
        return [pairs for series in self.series for pairs in series.pair_sets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much each look takes."""

    num_prompts: int | None = None
    """N; None: what the median look has."""
    num_pairs: int = 64
    max_tokens: int | None = None
    """Most tokens scored of each reasoning."""


def choose_num_prompts(looks: Sequence[StepDraw], num_prompts: int | None) -> int:
    """N of every look: what was asked for, else what the median look has; raises if none has it."""
    counts = [len(look.prompts.values) for look in looks]
    wanted = num_prompts or max(2, statistics.median_low(counts or [0]))
    if max(counts, default=0) < wanted:
        raise TooFewPromptsError(_nothing_to_measure(looks, wanted))
    return wanted


def _nothing_to_measure(looks: Sequence[StepDraw], wanted: int) -> str:
    num_rows = sum(look.num_rows for look in looks)
    if num_rows == sum(look.num_without_reasoning for look in looks):
        return (
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
    why = too_few_prompts(best, len(best.prompts.values), wanted)
    return f"{NOTHING}{where}{why}{remedy}"


def make_plan(drawn: Draw, scorer: Scorer, size: Size) -> Plan:
    """Encode what was drawn; looks with fewer prompts than the others are skipped.

    An environment without a look that can be measured is named, unless it is the only one.
    """
    if not drawn.series:
        raise TooFewPromptsError(
            f"the files hold no rows that can be used ({drawn.num_bad + drawn.num_torn} bad)"
        )
    planned: list[PlannedSeries] = []
    refusals: dict[str, TooFewPromptsError] = {}
    for env, looks in drawn.series.items():
        try:
            planned.append(_plan_series(env, looks, scorer, size))
        except TooFewPromptsError as error:
            refusals[env or "the rest"] = error
    if not planned:
        raise next(iter(refusals.values()))
    cost = sum(scorer.cost(pairs) for series in planned for pairs in series.pair_sets)
    unmeasured = {env: str(error).removeprefix(NOTHING) for env, error in refusals.items()}
    return Plan(series=tuple(planned), token_forwards=cost, unmeasured=unmeasured)


def _plan_series(
    env: str | None, looks: Sequence[StepDraw], scorer: Scorer, size: Size
) -> PlannedSeries:
    num_prompts = choose_num_prompts(looks, size.num_prompts)
    planned: list[PlannedLook] = []
    skipped: dict[str, str] = {}
    for look in looks:
        try:
            pairs = _encode(look, scorer, replace(size, num_prompts=num_prompts))
        except TooFewPromptsError as error:
            skipped[look.label] = str(error)
            continue
        scorer.check_fits(pairs)
        planned.append(PlannedLook(look, pairs))
    if not planned:
        raise TooFewPromptsError(f"{NOTHING}{next(iter(skipped.values()))}")
    return PlannedSeries(env=env, looks=tuple(planned), skipped=skipped, num_prompts=num_prompts)


def _encode(look: StepDraw, scorer: Scorer, size: Size) -> PairSet:
    assert size.num_prompts is not None
    return encode_step(
        look,
        scorer.encoder,
        num_prompts=size.num_prompts,
        num_pairs=size.num_pairs,
        max_tokens=size.max_tokens,
    )


def draw_turns(draw_turn: Callable[[int], Draw], *, turn: int) -> dict[int, Draw]:
    """Draws of every turn position except `turn`, up to the last that has rows."""
    found: dict[int, Draw] = {}
    for position in range(1, MOST_TURNS + 1):
        if position == turn:
            continue
        drawn = draw_turn(position)
        if not drawn.looks:
            break
        found[position] = drawn
    return found


def plan_turns(
    plan: Plan, turns: Mapping[int, Draw], scorer: Scorer, size: Size, *, turn: int
) -> Plan:
    """Add other turn positions of the last looks than `turn`; each costs a look, with the same N.

    One that cannot be measured is skipped: the looks matter more.
    """
    series, more = [], 0
    for planned in plan.series:
        found: dict[int, PairSet] = {}
        skipped: dict[int, str] = {}
        for position, drawn in turns.items():
            looks = drawn.series.get(planned.env, ())
            try:
                if looks:
                    pairs = _encode(
                        looks[-1], scorer, replace(size, num_prompts=planned.num_prompts)
                    )
                    scorer.check_fits(pairs)
                    found[position] = pairs
            except MooredError as error:
                skipped[position] = str(error)
        more += sum(scorer.cost(pairs) for pairs in found.values())
        series.append(replace(planned, turns=found, skipped_turns=skipped))
    cost = plan.token_forwards + more
    return replace(plan, series=tuple(series), turn=turn, token_forwards=cost)


def predict_seconds(plan: Plan, scorer: Scorer) -> float:
    """From a few reasonings under one prompt, timed after a warm-up."""
    pairs = plan.pair_sets[0]
    prompt, some = pairs.prompts[0], [pair.continuation for pair in pairs.pairs[:PROBE_PAIRS]]
    scorer.score([ScoreRequest(prompt, some[:1])])
    start = time.perf_counter()
    scorer.score([ScoreRequest(prompt, some)])
    elapsed_s = time.perf_counter() - start
    probed = scorer.token_forwards(len(prompt.ids), [len(ids) for ids in some])
    return elapsed_s * plan.token_forwards / probed


def diagnose(
    plan: Plan,
    drawn: Draw,
    scorers: Scorers,
    *,
    draws: int = 1000,
    seed: int = 0,
    closeups: bool = False,
    on_column: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Measure all planned looks, oldest first; `on_column` is called after each scored prompt."""
    start = time.perf_counter()
    measure = partial(_measure, on_column=on_column, draws=draws, seed=seed)
    measured = [_measure_series(planned, plan.turn, scorers, measure) for planned in plan.series]
    found = Diagnosis(
        series=tuple(series for series, _ in measured),
        unmeasured=plan.unmeasured,
        source=f"scored with {_models([look for series, _ in measured for look in series.looks])}",
        temperature=scorers.temperature,
        token_forwards=plan.token_forwards,
        num_bad_rows=drawn.num_bad,
        num_torn_rows=drawn.num_torn,
        seconds=time.perf_counter() - start,
    )
    if not closeups:
        return found
    return found.with_closeups(measured[found.series.index(found.worst)][1])


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


Measured = tuple[np.ndarray, CollapseReport]


def _measure_series(
    planned: PlannedSeries,
    turn: int,
    scorers: Scorers,
    measure: Callable[[PairSet, Scorer], Measured],
) -> tuple[Series, list[Closeup]]:
    """The looks of one environment, and close-ups of the first and the last."""
    watch, looks, closeups = CollapseWatch(), [], []
    for look in planned.looks:
        scorer = scorers.at(look.draw.step)
        logp_MN, report = measure(look.pairs, scorer)
        prompts = {pair.prompt.key for pair in look.pairs.pairs}
        watched = watch.update(look.draw.step, report, prompts=prompts)
        looks.append(
            Look(
                steps=look.draw.steps,
                watched=watched,
                num_rows=look.draw.num_rows,
                valid_thinking_rate=look.pairs.valid_thinking_rate,
                reasoning_tokens_mean=float(look.pairs.lengths.mean()),
                rewards=look.draw.rewards(),
                worth=worth_of(look.pairs, logp_MN, [p.group_id for p in look.pairs.pairs]),
                model=scorer.name,
                steps_away=scorers.steps_away(look.draw.step),
            )
        )
        if look in (planned.looks[0], planned.looks[-1]):
            closeups.append(_closeup(look, logp_MN, scorer))
    scorer = scorers.at(planned.looks[-1].draw.step)
    reports = {place: measure(pairs, scorer)[1] for place, pairs in planned.turns.items()}
    if reports:
        reports[turn] = looks[-1].report
    series = Series(
        env=planned.env,
        view=ONE_TURN,
        looks=tuple(looks),
        alarm=watch.alarm,
        skipped=planned.skipped,
        turns=tuple(TurnLook(turn=place, report=reports[place]) for place in sorted(reports)),
        skipped_turns=planned.skipped_turns,
    )
    return series, closeups


def _measure(
    pairs: PairSet, scorer: Scorer, *, on_column: Callable[[], None], draws: int, seed: int
) -> Measured:
    """(M, N) scores, and what they say."""
    logp_MN = cross_score(pairs, _one_by_one(scorer.score, on_column))
    report = information(
        logp_MN,
        pairs.columns,
        pairs.lengths,
        bootstrap=draws,
        permutations=draws,
        seed=seed,
    )
    return logp_MN, report


def _one_by_one(score: ScoreFn, on_column: Callable[[], None]) -> ScoreFn:
    """One request at a time, so that progress can be shown."""

    def scored(requests: Sequence[ScoreRequest]) -> list[Sequence[np.ndarray]]:
        columns = []
        for request in requests:
            columns += score([request])
            on_column()
        return columns

    return scored


def _closeup(look: PlannedLook, logp_MN: np.ndarray, scorer: Scorer) -> Closeup:
    text, pairs = scorer.encoder.text, look.pairs
    return Closeup(
        name="All scores" if look.draw.step is None else f"Step {look.draw.label}",
        prompts=tuple(text(prompt.ids) for prompt in pairs.prompts),
        reasonings=tuple(text(pair.continuation[pair.num_opening :]) for pair in pairs.pairs),
        token=Likelihood.of(logp_MN / pairs.lengths[:, None], pairs.columns),
    )
