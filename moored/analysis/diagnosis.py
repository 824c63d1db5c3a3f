"""Cross-score every drawn step, and say what it shows: reports, regimes, the alarm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from moored.analysis.sample import Draw, RewardStats, StepDraw, encode_step, too_few_prompts
from moored.analysis.scorers import Scorer
from moored.diagnostics.alarm import SMOOTH, Alarm
from moored.diagnostics.information import Likelihood, information
from moored.diagnostics.pairs import PairSet, ScoreFn, cross_score
from moored.diagnostics.report import CollapseReport, Regime, Verdict
from moored.diagnostics.watch import CollapseWatch, Watched
from moored.errors import MooredError, TooFewPromptsError
from moored.types import ScoreRequest

SCHEMA = 1
PROBE_PAIRS = 4
MIN_LOOKS = SMOOTH
"""An alarm needs at least this many steps."""
MOST_TURNS = 10
"""Most turn positions that are measured; each costs as much as a step."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    draw: StepDraw
    pairs: PairSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be scored, and what that costs."""

    steps: tuple[PlannedStep, ...]
    skipped: Mapping[int | None, str]
    """Step -> why it cannot be measured."""
    num_prompts: int
    token_forwards: int
    turn: int = 1
    """Turn position that the steps look at."""
    turns: Mapping[int, PairSet] = field(default_factory=dict)
    """Other turn position -> its pairs in the last step."""
    skipped_turns: Mapping[int, str] = field(default_factory=dict)
    """Turn position -> why it cannot be measured."""

    @property
    def num_columns(self) -> int:
        pairs = [*(step.pairs for step in self.steps), *self.turns.values()]
        return sum(len(each.prompts) for each in pairs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Closeup:
    """What a look was measured on, for display: M reasonings, N prompts, every score."""

    prompts: tuple[str, ...]
    reasonings: tuple[str, ...]
    """As far as they were scored."""
    token: Likelihood
    """Per token; `token.gain_M` has the MI as its mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One step, measured."""

    step: int | None
    verdict: Verdict
    why: str
    regime: Regime | None
    report: CollapseReport
    num_rows: int
    valid_thinking_rate: float
    reasoning_tokens_mean: float
    rewards: RewardStats | None
    closeup: Closeup | None = None
    """Kept of the first and the last look, when asked for."""

    def to_dict(self) -> dict[str, object]:
        """The figures, ready for JSON; not the closeup."""
        stored: dict[str, object] = asdict(replace(self, closeup=None))
        del stored["closeup"]
        return stored | {"report": self.report.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLook:
    """One turn position of the last step, measured."""

    turn: int
    report: CollapseReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All steps of the files."""

    looks: tuple[Look, ...]
    skipped: Mapping[int | None, str]
    alarm: Alarm | None
    token_forwards: int
    seconds: float
    num_bad_rows: int
    num_torn_rows: int
    turns: tuple[TurnLook, ...] = ()
    """Turn positions of the last step; none unless they were planned."""
    skipped_turns: Mapping[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Everything measured, ready for JSON."""
        return {
            "schema": SCHEMA,
            "looks": [look.to_dict() for look in self.looks],
            "skipped": [{"step": step, "why": why} for step, why in self.skipped.items()],
            "turns": [{"turn": t.turn, "report": t.report.to_dict()} for t in self.turns],
            "skipped_turns": [{"turn": t, "why": why} for t, why in self.skipped_turns.items()],
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "token_forwards": self.token_forwards,
            "seconds": self.seconds,
            "num_bad_rows": self.num_bad_rows,
            "num_torn_rows": self.num_torn_rows,
        }


def choose_num_prompts(drawn: Draw, num_prompts: int | None) -> int:
    """N of every look: what was asked for, else what the median step has; raises if none has it."""
    counts = [len(step.prompts.values) for step in drawn.steps]
    wanted = num_prompts or max(2, statistics.median_low(counts or [0]))
    if max(counts, default=0) < wanted:
        raise TooFewPromptsError(_nothing_to_measure(drawn, wanted))
    return wanted


def _nothing_to_measure(drawn: Draw, wanted: int) -> str:
    if not drawn.steps:
        return f"the files hold no rows that can be used ({drawn.num_bad + drawn.num_torn} bad)"
    num_rows = sum(step.num_rows for step in drawn.steps)
    if num_rows == sum(step.num_without_reasoning for step in drawn.steps):
        return (
            f"no response holds reasoning tags ({num_rows} rows); name yours with --tags OPEN "
            f"CLOSE, or measure whole responses: --whole"
        )
    best = max(drawn.steps, key=lambda step: len(step.prompts.values))
    where = "" if best.step is None else f"step {best.step} "
    remedy = "; pool steps with --window, or lower --prompts" if len(drawn.steps) > 1 else ""
    why = too_few_prompts(best, len(best.prompts.values), wanted)
    return f"nothing can be measured: {where}{why}{remedy}"


def make_plan(
    drawn: Draw, scorer: Scorer, *, num_prompts: int, num_pairs: int, max_tokens: int | None = None
) -> Plan:
    """Encode what was drawn; steps with fewer than `num_prompts` prompts are skipped."""
    steps: list[PlannedStep] = []
    skipped: dict[int | None, str] = {}
    for step in drawn.steps:
        try:
            pairs = encode_step(
                step,
                scorer.encoder,
                num_prompts=num_prompts,
                num_pairs=num_pairs,
                max_tokens=max_tokens,
            )
        except TooFewPromptsError as error:
            skipped[step.step] = str(error)
            continue
        scorer.check_fits(pairs)
        steps.append(PlannedStep(step, pairs))
    if not steps:
        raise TooFewPromptsError(f"nothing can be measured: {next(iter(skipped.values()))}")
    return Plan(
        steps=tuple(steps),
        skipped=skipped,
        num_prompts=num_prompts,
        token_forwards=sum(scorer.cost(step.pairs) for step in steps),
    )


def draw_turns(
    draw_turn: Callable[[int], Draw], step: int | None, *, turn: int
) -> dict[int, StepDraw]:
    """Draws of every turn position of a step except `turn`, up to the last that has rows."""
    found: dict[int, StepDraw] = {}
    for position in range(1, MOST_TURNS + 1):
        if position == turn:
            continue
        of_step = [drawn for drawn in draw_turn(position).steps if drawn.step == step]
        if not of_step:
            break
        found[position] = of_step[0]
    return found


def plan_turns(
    plan: Plan,
    turns: Mapping[int, StepDraw],
    scorer: Scorer,
    *,
    turn: int,
    num_pairs: int,
    max_tokens: int | None = None,
) -> Plan:
    """Add other turn positions of the last step than `turn`; each costs a look, with the same N.

    One that cannot be measured is skipped: the steps matter more.
    """
    planned: dict[int, PairSet] = {}
    skipped: dict[int, str] = {}
    for position, drawn in turns.items():
        try:
            pairs = encode_step(
                drawn,
                scorer.encoder,
                num_prompts=plan.num_prompts,
                num_pairs=num_pairs,
                max_tokens=max_tokens,
            )
            scorer.check_fits(pairs)
        except MooredError as error:
            skipped[position] = str(error)
            continue
        planned[position] = pairs
    more = sum(scorer.cost(pairs) for pairs in planned.values())
    return replace(
        plan,
        turn=turn,
        turns=planned,
        skipped_turns=skipped,
        token_forwards=plan.token_forwards + more,
    )


def predict_seconds(plan: Plan, scorer: Scorer) -> float:
    """From a few reasonings under one prompt, timed after a warm-up."""
    pairs = plan.steps[0].pairs
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
    scorer: Scorer,
    *,
    draws: int = 1000,
    seed: int = 0,
    closeups: bool = False,
    on_column: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Measure all planned steps, oldest first; `on_column` is called after each scored prompt."""
    start = time.perf_counter()
    watch = CollapseWatch()

    def score(requests: Sequence[ScoreRequest]) -> list[Sequence[np.ndarray]]:
        columns = []
        for request in requests:
            columns += scorer.score([request])
            on_column()
        return columns

    measure = partial(_measure, score=score, draws=draws, seed=seed)
    looks = []
    for planned in plan.steps:
        logp_MN, report = measure(planned.pairs)
        look = _look(planned, watch.update(planned.draw.step, report))
        if closeups and planned in (plan.steps[0], plan.steps[-1]):
            look = replace(look, closeup=_closeup(logp_MN, planned.pairs, scorer))
        looks.append(look)
    reports = {turn: measure(pairs)[1] for turn, pairs in plan.turns.items()}
    return Diagnosis(
        looks=tuple(looks),
        skipped=plan.skipped,
        alarm=watch.alarm,
        token_forwards=plan.token_forwards,
        num_bad_rows=drawn.num_bad,
        num_torn_rows=drawn.num_torn,
        turns=_turn_looks({plan.turn: looks[-1].report, **reports}) if reports else (),
        skipped_turns=plan.skipped_turns,
        seconds=time.perf_counter() - start,
    )


def _measure(
    pairs: PairSet, *, score: ScoreFn, draws: int, seed: int
) -> tuple[np.ndarray, CollapseReport]:
    """(M, N) scores, and what they say."""
    logp_MN = cross_score(pairs, score)
    report = information(
        logp_MN,
        pairs.columns,
        pairs.lengths,
        bootstrap=draws,
        permutations=draws,
        seed=seed,
    )
    return logp_MN, report


def _look(planned: PlannedStep, watched: Watched) -> Look:
    return Look(
        step=planned.draw.step,
        verdict=watched.verdict,
        why=watched.why,
        regime=watched.regime,
        report=watched.report,
        num_rows=planned.draw.num_rows,
        valid_thinking_rate=planned.pairs.valid_thinking_rate,
        reasoning_tokens_mean=float(planned.pairs.lengths.mean()),
        rewards=planned.draw.rewards(),
    )


def _turn_looks(reports: Mapping[int, CollapseReport]) -> tuple[TurnLook, ...]:
    return tuple(TurnLook(turn=turn, report=reports[turn]) for turn in sorted(reports))


def _closeup(logp_MN: np.ndarray, pairs: PairSet, scorer: Scorer) -> Closeup:
    text = scorer.encoder.text
    return Closeup(
        prompts=tuple(text(prompt.ids) for prompt in pairs.prompts),
        reasonings=tuple(text(pair.continuation[pair.num_opening :]) for pair in pairs.pairs),
        token=Likelihood.of(logp_MN / pairs.lengths[:, None], pairs.columns),
    )
