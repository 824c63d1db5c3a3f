"""What a run's looks say: reports, verdicts and alarms of every environment.

`Diagnosis` is what terminal, JSON and page show, wherever its looks come from: `diagnose` makes
them from rollout files and a model, `stored` from what training measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from moored.diagnostics.alarm import Alarm
from moored.diagnostics.chain import Link
from moored.diagnostics.information import Likelihood
from moored.diagnostics.look import WORST_FIRST
from moored.diagnostics.report import CollapseReport, Regime, Verdict
from moored.diagnostics.watch import Watched
from moored.diagnostics.worth import Worth

SCHEMA = 2
TRAINING = "training"
"""Stands for the model where training measured."""
FOREIGN_NATS = 4.0
"""H(Z|X) per token above which the scoring model cannot be the one that wrote the text."""
FAR_STEPS = 10
"""Weights that are further from a step than this may be of another mind: runs fall in ten steps."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Closeup:
    """What a look was measured on, for display: M reasonings, N prompts, every score."""

    name: str
    prompts: tuple[str, ...]
    reasonings: tuple[str, ...]
    """As far as they were scored."""
    token: Likelihood
    """Per token; `token.gain_M` has the MI as its mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


def label_of(steps: Sequence[int]) -> str:
    """Names the steps of a look: "5", "1–8", or "all" where steps have no numbers."""
    if not steps:
        return "all"
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One step, or several pooled, measured and judged in the light of the looks before it."""

    steps: tuple[int, ...]
    """The steps it holds; empty where the files number none."""
    watched: Watched
    num_rows: int | None = None
    valid_thinking_rate: float | None = None
    """Share of the rows that hold a reasoning."""
    reasoning_tokens_mean: float | None = None
    rewards: RewardStats | None = None
    worth: Worth | None = None
    """What dependence earns; None where rewards do not vary inside prompts, or are not known."""
    model: str = TRAINING
    """What scored it."""
    steps_away: int = 0
    """Steps between the last one and the weights that scored it."""

    @property
    def step(self) -> int | None:
        """The last step."""
        return self.steps[-1] if self.steps else None

    @property
    def label(self) -> str:
        """The steps in words: "5", or "1–8"."""
        return label_of(self.steps)

    @property
    def is_stale(self) -> bool:
        """Other weights than those that scored it have written its replies."""
        return self.steps_away > FAR_STEPS

    @property
    def report(self) -> CollapseReport:
        return self.watched.report

    @property
    def verdict(self) -> Verdict:
        return self.watched.verdict

    @property
    def why(self) -> str:
        return self.watched.why

    @property
    def regime(self) -> Regime | None:
        return self.watched.regime

    def to_dict(self) -> dict[str, object]:
        """The figures, ready for JSON."""
        return {
            "step": self.step,
            "first_step": self.steps[0] if self.steps else None,
            "num_steps": len(self.steps),
            "verdict": self.verdict,
            "why": self.why,
            "prompts_needed": self.watched.prompts_needed,
            "regime": self.regime,
            "num_rows": self.num_rows,
            "valid_thinking_rate": self.valid_thinking_rate,
            "reasoning_tokens_mean": self.reasoning_tokens_mean,
            "rewards": None if self.rewards is None else asdict(self.rewards),
            "worth": None if self.worth is None else self.worth.to_dict(),
            "model": self.model,
            "steps_away": self.steps_away,
            "report": self.report.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLook:
    """One turn position of the last look, measured."""

    turn: int
    report: CollapseReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The looks of one environment, oldest first."""

    env: str | None
    """None where the files name none."""
    view: str
    """What the looks compare: `first_turn`, `observation_swap`, …"""
    looks: tuple[Look, ...]
    alarm: Alarm | None
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Steps -> why they cannot be measured."""
    turns: tuple[TurnLook, ...] = ()
    """Turn positions of the last look; none unless they were asked for."""
    skipped_turns: Mapping[int, str] = field(default_factory=dict)
    others: Mapping[str, tuple[Look, ...]] = field(default_factory=dict)
    """Further views, by name; the verdict is not theirs."""
    links: Mapping[str, tuple[tuple[int, Link], ...]] = field(default_factory=dict)
    """The rest of the chain, by name in the log: steps, and what was found at each."""
    unmeasured_since: int | None = None
    """Step from which on no look of training could be measured; None: the last one was."""

    @property
    def name(self) -> str:
        """Of the environment; "the rest" are rows that name none where others do."""
        return self.env or "the rest"

    @property
    def worths(self) -> list[tuple[Look, Worth]]:
        """Looks that tell what dependence earns: those at first turns, or at a turn of files."""
        looks = (look for view in (self.looks, *self.others.values()) for look in view)
        return [(look, look.worth) for look in looks if look.worth is not None]

    @property
    def is_foreign(self) -> bool:
        """A model scores texts that it would not have written; in training it wrote them."""
        entropy = self.looks[-1].report.conditional_entropy_est
        return self.looks[-1].model != TRAINING and entropy > FOREIGN_NATS

    @property
    def doubt(self) -> str:
        """Why the figures of the last look decide nothing; empty where they do."""
        last = self.looks[-1]
        if self.is_foreign:
            return (
                f"H(Z|X) is {last.report.conditional_entropy_est:.1f} nats per token: this model "
                f"would not have written these reasonings. Score with the one that did."
            )
        if last.is_stale:
            return (
                f"The weights that score step {last.label} ({last.model}) are {last.steps_away} "
                f"steps away from those that wrote it. Score with a checkpoint of that time."
            )
        return ""

    @property
    def verdict(self) -> Verdict:
        """That of the last look; health that could not be measured to the end cannot be told."""
        found = self.looks[-1].verdict
        is_open = self.unmeasured_since is not None and found is Verdict.HEALTHY
        return Verdict.CANNOT_TELL if is_open or self.doubt else found

    @property
    def collapsed_at(self) -> Look | None:
        """The look since which the series has been collapsed; None when it is not.

        Looks in between that cannot tell do not end a collapse.
        """
        if self.verdict is not Verdict.COLLAPSED:
            return None
        found = self.looks[-1]
        for look in reversed(self.looks):
            if look.verdict is Verdict.HEALTHY:
                break
            found = look if look.verdict is Verdict.COLLAPSED else found
        return found

    def to_dict(self) -> dict[str, object]:
        return {
            "env": self.env,
            "view": self.view,
            "verdict": self.verdict,
            "why": self.doubt or self.looks[-1].why,
            "is_foreign": self.is_foreign,
            "looks": [look.to_dict() for look in self.looks],
            "unmeasured_since": self.unmeasured_since,
            "skipped": [{"steps": steps, "why": why} for steps, why in self.skipped.items()],
            "turns": [{"turn": t.turn, "report": t.report.to_dict()} for t in self.turns],
            "skipped_turns": [{"turn": t, "why": why} for t, why in self.skipped_turns.items()],
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "other_views": {
                name: [look.to_dict() for look in looks] for name, looks in self.others.items()
            },
            "chain": {
                name: [{"step": step} | asdict(link) for step, link in found]
                for name, found in self.links.items()
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All environments of a run or of some files."""

    series: tuple[Series, ...]
    """One for each environment that was measured."""
    source: str
    """Where the scores come from, as a phrase: "measured by training", "scored with nano"."""
    temperature: float
    """Log-probabilities are those of the model at this temperature."""
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    """Environments of which no look could be measured, and why."""
    warnings: tuple[str, ...] = ()
    token_forwards: int = 0
    seconds: float = 0.0
    num_bad_rows: int = 0
    num_torn_rows: int = 0
    outcome_free_share: float | None = None
    """Of a run: mean over its first steps; None where it is not known."""
    divides_by_std: bool = False
    """Of a run: its advantages are divided by the std of the group's rewards."""
    closeups: tuple[Closeup, ...] = ()
    """Of the first and the last look of the environment that is worst off, when asked for."""

    @property
    def verdict(self) -> Verdict:
        """Collapsed when an environment is; healthy when all are, which all must show."""
        found = {series.verdict for series in self.series}
        found |= {Verdict.CANNOT_TELL} if self.unmeasured else set()
        return next(verdict for verdict in WORST_FIRST if verdict in found)

    @property
    def is_of_one(self) -> bool:
        """There is one environment, which then needs no name."""
        return len(self.series) + len(self.unmeasured) == 1

    @property
    def worst(self) -> Series:
        """The first of the measured environments that are worst off."""
        return min(self.series, key=lambda series: WORST_FIRST.index(series.verdict))

    def with_closeups(self, closeups: Sequence[Closeup]) -> Diagnosis:
        return replace(self, closeups=tuple(closeups))

    def to_dict(self) -> dict[str, object]:
        """Everything measured, ready for JSON."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "source": self.source,
            "temperature": self.temperature,
            "warnings": list(self.warnings),
            "environments": [series.to_dict() for series in self.series],
            "unmeasured": dict(self.unmeasured),
            "outcome_free_share": self.outcome_free_share,
            "token_forwards": self.token_forwards,
            "seconds": self.seconds,
            "num_bad_rows": self.num_bad_rows,
            "num_torn_rows": self.num_torn_rows,
        }
