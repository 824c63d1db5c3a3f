"""Healthy, collapsed, or cannot tell: a verdict that says no more than the numbers do.

|  | healthy | collapsed |
|---|---|---|
| diversity high | diverse | template collapse |
| diversity low | compressed | low-entropy collapse |

Two floors, each held against a 99 % interval over prompts. Against what is possible: retrieval
from chance to 1, and MI per sequence from 0 to log N. Against the run's own start: MI per token,
and times their length where reasonings have become much longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from moored.diagnostics.level import CONFIDENCE, Level, pool
from moored.diagnostics.report import (
    CollapseReport,
    Interval,
    Regime,
    Verdict,
    length_growth,
)
from moored.diagnostics.resampling import t_quantile
from moored.errors import MooredError

POOLED_LOOKS = (1, 2, 4, 8)
"""Numbers of looks that are pooled, in turn, until a verdict can be reached."""
MIN_PROMPTS = 4
"""With fewer, the standard error of a look says nothing: it comes from its few prompts, too."""
ENOUGH_PROMPTS = 8
"""The least number of prompts that is asked for: the batch of the paper."""
MOST_PROMPTS = 10_000
"""More prompts than this are not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where the verdict and the regimes are cut. The entropy is per token, in nats."""

    min_dependence: float = 0.1
    """Share of what is possible, in retrieval and in MI, below which dependence counts as lost."""
    min_mi_of_start: float = 0.2
    """Share of the run's first MI below which input dependence counts as lost."""
    max_p_value: float = 0.01
    """Dependence is established up to this chance of seeing it where there is none."""
    min_prompts: int = MIN_PROMPTS
    """A look at fewer prompts never makes a verdict; pooled looks need twice as many."""
    min_entropy_of_start: float = 0.5
    """Share of the run's first H(Z|X) below which diversity counts as lost."""
    min_entropy_nats: float = 0.05
    """H(Z|X) per token that is low whatever the start was."""
    hysteresis: float = 1.5
    """To leave a low state a quantity must exceed its threshold by this factor."""

    def __post_init__(self) -> None:
        if self.hysteresis < 1.0:
            raise MooredError(f"hysteresis must be >= 1, got {self.hysteresis}")

    def has_enough(self, level: Level) -> bool:
        """True where a look, or pooled ones, have the prompts for a verdict."""
        return level.num_prompts >= self.min_prompts * (2 if level.num_looks > 1 else 1)


DEFAULT_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    verdict: Verdict
    why: str
    """One sentence."""
    prompts_needed: int | None = None
    """Roughly how many prompts would settle it; None when it is settled, or no number would."""


@dataclass(frozen=True, slots=True)
class _Test:
    """A share against its floor."""

    subject: str
    value: float
    standard_error: float
    floor: float
    level: Level

    @property
    def interval(self) -> Interval:
        half = self.level.half_width(self.standard_error)
        return Interval(self.value - half, self.value + half)

    @property
    def is_above(self) -> bool:
        return self.interval.low > self.floor

    @property
    def is_below(self) -> bool:
        return self.interval.high < self.floor

    @property
    def clearance(self) -> float:
        """Distance from the floor in standard errors; positive above it."""
        return (self.value - self.floor) / max(self.standard_error, 1e-12)

    def prompts_needed(self) -> float:
        """Prompts at which an interval around the same value would leave the floor out."""
        wanted = max(self.level.num_prompts, 1)
        while wanted <= MOST_PROMPTS:
            reach = abs(self.clearance) * math.sqrt(wanted / self.level.num_prompts)
            if reach > t_quantile(wanted - self.level.num_looks, CONFIDENCE):
                return wanted
            wanted = math.ceil(1.1 * wanted)
        return math.inf

    def text(self) -> str:
        low, high = self.interval.low, self.interval.high
        bounds = "wider than ±100%" if high - low > 2.0 else f"{low:.0%} to {high:.0%}"
        return f"{self.subject} {self.value:.0%} (99 % interval {bounds}, floor {self.floor:.0%})"


@dataclass(frozen=True, slots=True)
class _Tests:
    ceiling: _Test
    retrieval: _Test
    start: _Test | None

    @property
    def established(self) -> list[_Test] | None:
        """What shows that reasoning depends on its prompt; None when something is missing.

        MI or retrieval will do. MI is bounded above and not below: a few reasonings that the
        scorer finds very unlikely may pull it down, where retrieval still sees the dependence.
        """
        best = max(self.ceiling, self.retrieval, key=lambda test: test.clearance)
        needed = [best] if self.start is None else [best, self.start]
        return needed if all(test.is_above for test in needed) else None

    @property
    def refuted(self) -> _Test | None:
        """What shows that it does not, or far less than at the start.

        MI below a floor; where that is of the ceiling, retrieval must not be above its own.
        """
        if self.start is not None and self.start.is_below:
            return self.start
        return self.ceiling if self.ceiling.is_below and not self.retrieval.is_above else None

    def prompts_needed(self) -> float:
        """By the nearer of the two verdicts."""
        best = max(self.ceiling, self.retrieval, key=lambda test: test.clearance)
        for_health = [best] if self.start is None else [best, self.start]
        if all(test.clearance > 0.0 for test in for_health):
            return max(test.prompts_needed() for test in for_health)
        below = [t for t in (self.ceiling, self.start) if t is not None and t.clearance < 0.0]
        return min((test.prompts_needed() for test in below), default=math.inf)


def judge(
    level: Level,
    *,
    start: Level | None = None,
    previous: Verdict | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Judgement:
    """The verdict on one level, given the run's start and its last verdict that could tell.

    Healthy: the p-value is small, and the intervals lie above the floors. Collapsed: the interval
    of MI lies below a floor. Everything else: cannot tell.
    """
    looks = f" over the last {level.num_looks} looks" if level.num_looks > 1 else ""
    counted = f"{level.num_prompts} prompts{looks}"
    if level.num_degrees < 1:
        return _unknown(level, counted)
    tests = _tests(level, start, previous, thresholds)
    is_enough = thresholds.has_enough(level)
    has_dependence = level.p_value is None or level.p_value <= thresholds.max_p_value
    if is_enough and has_dependence and (facts := tests.established):
        text = " and ".join(test.text() for test in facts)
        return Judgement(
            verdict=Verdict.HEALTHY,
            why=f"Reasoning depends on its prompt: {text}{_p_text(level)}, from {counted}.",
        )
    if is_enough and (fact := tests.refuted):
        return Judgement(
            verdict=Verdict.COLLAPSED,
            why=f"{_loss(fact, tests)}: {fact.text()}, from {counted}.",
        )
    return _undecided(level, tests, counted, thresholds)


def _loss(fact: _Test, tests: _Tests) -> str:
    """What a refuted dependence comes to: below a share of the start there may be some left."""
    if fact is tests.start and (tests.ceiling.is_above or tests.retrieval.is_above):
        return "Reasoning depends on its prompt far less than at the start of the run"
    return "Reasoning hardly depends on its prompt"


def _tests(
    level: Level, start: Level | None, previous: Verdict | None, thresholds: Thresholds
) -> _Tests:
    factor = thresholds.hysteresis if previous is Verdict.COLLAPSED else 1.0
    floor = thresholds.min_dependence * factor
    of_start = None
    if start is not None and start.mi > 0.0 and start.num_degrees >= 1:
        start_floor = thresholds.min_mi_of_start * factor
        growth = length_growth(level.length, start.length)
        # The error of MI - floor * start, the difference whose sign is asked for.
        error = math.hypot(growth * level.mi_se, start_floor * start.mi_se) / start.mi
        times = f" times length ({growth:.1f} times the start's)" if growth > 1.0 else ""
        subject = f"MI{times}, as a share of the run's start, is"
        of_start = _Test(subject, growth * level.mi / start.mi, error, start_floor, level)
    return _Tests(
        ceiling=_Test(
            "MI per sequence, as a share of its ceiling, is",
            level.ceiling_share,
            level.ceiling_share_se,
            floor,
            level,
        ),
        retrieval=_Test(
            "retrieval, from chance (0%) to certainty (100%), is at",
            level.dependence,
            level.dependence_se,
            floor,
            level,
        ),
        start=of_start,
    )


def _unknown(level: Level, counted: str) -> Judgement:
    """Where no standard error says how far the estimates may be off."""
    needed = f"at least {ENOUGH_PROMPTS} prompts are needed"
    if level.num_prompts == 1:
        why = f"Reasonings of one prompt cannot tell; {needed}."
    elif level.num_prompts == 2:
        why = (
            f"2 prompts cannot tell: they are one comparison, and how much another would differ "
            f"is not known; {needed}."
        )
    else:
        why = f"{counted} cannot tell: the standard errors of the look are not known."
    is_few = level.num_prompts < ENOUGH_PROMPTS
    return Judgement(
        verdict=Verdict.CANNOT_TELL, why=why, prompts_needed=ENOUGH_PROMPTS if is_few else None
    )


def _undecided(level: Level, tests: _Tests, counted: str, thresholds: Thresholds) -> Judgement:
    wanted = max(tests.prompts_needed(), ENOUGH_PROMPTS, level.num_prompts + 1)
    p, most = level.p_value, thresholds.max_p_value
    if p is not None and p > most and tests.ceiling.clearance > 0.0:
        z, asked = _normal_score(p), _normal_score(most)
        wanted = max(wanted, level.num_prompts * (asked / z) ** 2 if z > 0.0 else math.inf)
    prompts_needed = math.ceil(wanted) if wanted <= MOST_PROMPTS else None
    closest = min(
        (test for test in (tests.start, tests.ceiling) if test is not None),
        key=lambda test: abs(test.clearance),
    )
    remedy = (
        f"about {prompts_needed} prompts are needed"
        if prompts_needed
        else "it lies too near to the floor for any number of prompts"
    )
    return Judgement(
        verdict=Verdict.CANNOT_TELL,
        why=f"{counted} cannot tell: {closest.text()}{_p_text(level)}; {remedy}.",
        prompts_needed=prompts_needed,
    )


def _normal_score(p_value: float) -> float:
    """Standard errors above chance that have this one-sided p-value."""
    return NormalDist().inv_cdf(1.0 - min(max(p_value, 1e-6), 1.0 - 1e-6))


def _p_text(level: Level) -> str:
    if level.p_value is None:
        return ""
    return f", p = {level.p_value:.3f}" if level.p_value >= 0.0005 else ", p < 0.001"


def first_level(looks: Sequence[Level], thresholds: Thresholds) -> Level | None:
    """What later looks of a run are held against; None while its looks so far do not show it.

    The first look, or, where the standard error of that is not known, all up to the one that makes
    enough prompts: their scatter says how far such looks are off.
    """
    level = pool(looks)
    is_shown = level.num_looks == 1 or thresholds.has_enough(level)
    return level if level.num_degrees >= 1 and is_shown else None


def judge_series(
    looks: Sequence[Level],
    *,
    start: Level | None = None,
    previous: Verdict | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Judgement:
    """The verdict on the newest look, pooled with as few earlier ones as it takes.

    Earlier looks are left out when the newest contradicts them: a run that is changing is judged
    by what it is now.
    """
    found = judge(looks[-1], start=start, previous=previous, thresholds=thresholds)
    for count in POOLED_LOOKS[1:]:
        if found.verdict is not Verdict.CANNOT_TELL or count > len(looks):
            return found
        level = pool(looks[-count:])
        if not _agree(looks[-1], level):
            return found
        found = judge(level, start=start, previous=previous, thresholds=thresholds)
    return found


def _agree(newest: Level, pooled: Level) -> bool:
    if newest.num_prompts < MIN_PROMPTS:
        return True  # Too small to contradict anything.
    pairs = (
        (newest.mi, pooled.mi, newest.mi_se),
        (newest.dependence, pooled.dependence, newest.dependence_se),
    )
    return all(abs(a - b) <= newest.half_width(error) + 1e-12 for a, b, error in pairs)


def regime_of(
    verdict: Verdict,
    entropy: float,
    *,
    start_entropy: float | None = None,
    previous: Regime | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Regime | None:
    """Name the corner of the plane; None when the verdict cannot tell."""
    if verdict is Verdict.CANNOT_TELL:
        return None
    floor = thresholds.min_entropy_nats
    if start_entropy is not None:
        floor = max(floor, thresholds.min_entropy_of_start * start_entropy)
    was_low = previous is not None and not previous.is_diverse
    is_diverse = entropy >= floor * (thresholds.hysteresis if was_low else 1.0)
    if verdict is Verdict.HEALTHY:
        return Regime.DIVERSE if is_diverse else Regime.COMPRESSED
    return Regime.TEMPLATE_COLLAPSE if is_diverse else Regime.LOW_ENTROPY_COLLAPSE


def judged(report: CollapseReport) -> CollapseReport:
    """The report with the verdict that it allows on its own."""
    found = judge(Level.of(report))
    regime = regime_of(found.verdict, report.conditional_entropy_est)
    return replace(report, verdict=found.verdict, why=found.why, regime=regime)
