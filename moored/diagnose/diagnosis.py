"""Cross-score every drawn step, and say what it shows: reports, regimes, the alarm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from moored.diagnose.encode import encode_step, too_few_prompts
from moored.diagnose.sample import Draw, RewardStats, StepDraw
from moored.diagnose.scorers import Scorer
from moored.diagnostics.alarm import SMOOTH, Alarm, CollapseAlarm
from moored.diagnostics.information import information
from moored.diagnostics.pairs import PairSet
from moored.diagnostics.regimes import Regime, RegimeTracker
from moored.diagnostics.report import CollapseReport, ZScoreEMA
from moored.diagnostics.scoring import cross_score
from moored.errors import TooFewPromptsError
from moored.types import Prompt

SCHEMA = 1
PROBE_PAIRS = 4
MIN_LOOKS = SMOOTH
"""Steps without which there is no alarm."""


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

    @property
    def num_columns(self) -> int:
        return sum(len(step.pairs.prompts) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One step, measured."""

    step: int | None
    regime: Regime
    report: CollapseReport
    num_rows: int
    valid_thinking_rate: float
    reasoning_tokens_mean: float
    rewards: RewardStats | None


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

    def to_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        looks = [asdict(look) | {"report": look.report.to_dict()} for look in self.looks]
        return {
            "schema": SCHEMA,
            "looks": looks,
            "skipped": [{"step": step, "why": why} for step, why in self.skipped.items()],
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


def predict_seconds(plan: Plan, scorer: Scorer) -> float:
    """From a few reasonings under one prompt, timed after a warm-up."""
    pairs = plan.steps[0].pairs
    prompt, some = pairs.prompts[0], [pair.continuation for pair in pairs.pairs[:PROBE_PAIRS]]
    scorer.score(prompt, some[:1])
    start = time.perf_counter()
    scorer.score(prompt, some)
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
    on_column: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Measure all planned steps, oldest first; `on_column` is called after each scored prompt."""
    start = time.perf_counter()
    ema, regimes, alarm = ZScoreEMA(), RegimeTracker(), CollapseAlarm()

    def score(prompt: Prompt, continuations: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        scored = scorer.score(prompt, continuations)
        on_column()
        return scored

    looks = []
    for planned in plan.steps:
        pairs = planned.pairs
        report = information(
            cross_score(pairs, score),
            pairs.columns,
            pairs.lengths,
            bootstrap=draws,
            permutations=draws,
            seed=seed,
        )
        report = ema.update(report)
        step = planned.draw.step
        if step is not None:
            alarm.update(step, report.mi_estimate, report.conditional_entropy_est)
        looks.append(_look(planned, report, regimes.update(report)))
    return Diagnosis(
        looks=tuple(looks),
        skipped=plan.skipped,
        alarm=alarm.alarm,
        token_forwards=plan.token_forwards,
        seconds=time.perf_counter() - start,
        num_bad_rows=drawn.num_bad,
        num_torn_rows=drawn.num_torn,
    )


def _look(planned: PlannedStep, report: CollapseReport, regime: Regime) -> Look:
    return Look(
        step=planned.draw.step,
        regime=regime,
        report=report,
        num_rows=planned.draw.num_rows,
        valid_thinking_rate=planned.pairs.valid_thinking_rate,
        reasoning_tokens_mean=float(planned.pairs.lengths.mean()),
        rewards=planned.draw.rewards(),
    )
