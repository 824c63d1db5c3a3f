"""What one look at a run found: its numbers, and what they say of every environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from moored.diagnostics.alarm import Alarm
from moored.diagnostics.pairs import PairSet
from moored.diagnostics.report import CollapseReport, Regime, Verdict
from moored.diagnostics.watch import Watched
from moored.types import Group, ScoreMatrix, Turn

POOLED = ""
"""Stands for all environments together where an environment is named."""
WORST_FIRST = (Verdict.COLLAPSED, Verdict.CANNOT_TELL, Verdict.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLook:
    """One environment at one look."""

    view: str | None
    """Key in `Measurement.reports` of the view that is followed; None before one was measured."""
    watched: Watched | None
    """What that view says; None when it could not be measured."""
    share_unmeasured: float | None
    """Replies without a valid reasoning: they never enter MI. None without replies."""

    @property
    def verdict(self) -> Verdict:
        return Verdict.CANNOT_TELL if self.watched is None else self.watched.verdict

    @property
    def why(self) -> str:
        """One sentence that gives the verdict its reason."""
        return "not measured at this step" if self.watched is None else self.watched.why

    @property
    def regime(self) -> Regime | None:
        """None where the verdict is `cannot_tell`."""
        return None if self.watched is None else self.watched.regime

    @property
    def alarm(self) -> Alarm | None:
        """Set in the step in which the alarm goes off."""
        return None if self.watched is None else self.watched.alarm

    def to_dict(self) -> dict[str, object]:
        """Everything but the report, ready for JSON."""
        return {
            "view": self.view,
            "verdict": self.verdict,
            "why": self.why,
            "prompts_needed": None if self.watched is None else self.watched.prompts_needed,
            "regime": self.regime,
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "share_unmeasured": self.share_unmeasured,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One look at a run."""

    step: int
    metrics: Mapping[str, float]
    """Numbers for the log; a view that could not be measured is missing here and in `skipped`."""
    reports: Mapping[str, CollapseReport]
    """By view: first_turn, observation_swap, trajectory, turn_1, turn_2, … In a run with several
    environments ENV/first_turn, …; first_turn and trajectory are then pooled figures."""
    skipped: Mapping[str, str]
    """View (or ENV/view) -> why it could not be measured."""
    environments: Mapping[str, EnvironmentLook]
    scores: Mapping[str, ScoreMatrix] = field(default_factory=dict, compare=False, repr=False)
    """By view, of the first turn and of observation swap."""
    pairs: Mapping[str, PairSet] = field(default_factory=dict, compare=False, repr=False)
    """By view, what the scores of the first turn are of."""

    @property
    def worst(self) -> EnvironmentLook | None:
        """The environment that is worst off: a run is as healthy as this one."""
        looks = self.environments.values()
        return min(looks, key=lambda look: WORST_FIRST.index(look.verdict), default=None)

    @property
    def verdict(self) -> Verdict:
        """Of the worst environment."""
        return Verdict.CANNOT_TELL if self.worst is None else self.worst.verdict

    @property
    def regime(self) -> Regime | None:
        """Of the worst environment."""
        return None if self.worst is None else self.worst.regime

    @property
    def alarm(self) -> Alarm | None:
        """Set in the step in which the alarm of an environment goes off."""
        return next((look.alarm for look in self.environments.values() if look.alarm), None)

    def to_dict(self) -> dict[str, object]:
        """Everything but step, scores and pairs, ready for JSON: a line of `collapse.jsonl`."""
        return {
            **self.metrics,
            "verdict": self.verdict,
            "regime": self.regime,
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "environments": {env: look.to_dict() for env, look in self.environments.items()},
            "skipped": dict(self.skipped),
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
        }


@dataclass(slots=True, kw_only=True)
class LookBuilder:
    """A measurement as it grows, and how its parts are named."""

    step: int
    is_one: bool
    """The run has one environment, which then needs no name."""
    metrics: dict[str, float] = field(default_factory=dict)
    reports: dict[str, CollapseReport] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    scores: dict[str, ScoreMatrix] = field(default_factory=dict)
    pairs: dict[str, PairSet] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Environment -> a sentence to add where it is healthy."""

    def name(self, env: str, view: str) -> str:
        return view if self.is_one or env == POOLED else f"{env}/{view}"

    def prefix(self, env: str, of_view: str) -> str:
        return of_view if self.is_one or env == POOLED else f"{of_view}/{env}"

    def count_replies(self, env: str, groups: Sequence[Group]) -> None:
        """Log how many replies hold a reasoning, also when no view can be measured."""
        missing = share_unmeasured(groups)
        valid = _share_valid(_all_turns(groups))
        # RAGEN's name for the share of turns, first or later, that hold a reasoning.
        self.metrics[f"collapse/{env}valid_thinking_rate"] = valid
        self.metrics[f"collapse/{env}share_unmeasured"] = 1.0 if missing is None else missing


def share_unmeasured(groups: Sequence[Group]) -> float | None:
    """Share of all replies that hold no valid reasoning; None without replies."""
    turns = _all_turns(groups)
    return 1.0 - _share_valid(turns) if turns else None


def _all_turns(groups: Sequence[Group]) -> list[Turn]:
    return [turn for group in groups for t in group.trajectories for turn in t.turns]


def _share_valid(turns: Sequence[Turn]) -> float:
    return sum(len(turn.reasoning_ids) > 0 for turn in turns) / max(len(turns), 1)
