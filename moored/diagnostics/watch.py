"""One series of reports over a run: smoothing, verdict and alarm, the same for every trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from moored.diagnostics.alarm import Alarm, CollapseAlarm
from moored.diagnostics.level import Level
from moored.diagnostics.report import STD_EPS, CollapseReport, Regime, Verdict
from moored.diagnostics.verdict import (
    DEFAULT_THRESHOLDS,
    POOLED_LOOKS,
    Judgement,
    Thresholds,
    first_level,
    judge_series,
    regime_of,
)
from moored.errors import MooredError


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What one look says in the light of those before it."""

    report: CollapseReport
    """With its `*_ema` fields filled."""
    verdict: Verdict
    why: str
    """One sentence that gives the verdict its reason."""
    prompts_needed: int | None
    """Roughly how many prompts would settle it, when the verdict is `cannot_tell`."""
    regime: Regime | None
    """None when the verdict is `cannot_tell`."""
    alarm: Alarm | None
    """Set in the look in which the alarm goes off."""
    has_nothing_to_lose: bool = False
    """MI was never clearly above zero, so no alarm can go off."""


def reconciled(watched: Mapping[str, Watched], view: str | None, note: str = "") -> Watched | None:
    """What the followed view says, unless another view contradicts it in kind: then `cannot_tell`.

    Where the whole dialogue or the first turn says nothing of the reasoning, or where the first
    turn still does, one of the two is fooled. A dialogue that says more than the observations in it
    is no contradiction: reasoning then copies its own history. `note` is added to health.
    """
    found = watched.get(view or "")
    if found is None:
        return None
    opposite = {
        Verdict.HEALTHY: {"first_turn": Verdict.COLLAPSED, "trajectory": Verdict.COLLAPSED},
        Verdict.COLLAPSED: {"first_turn": Verdict.HEALTHY},
    }.get(found.verdict, {})
    others = [
        other
        for other, verdict in opposite.items()
        if other != view and other in watched and watched[other].verdict is verdict
    ]
    if not others:
        is_noted = note and found.verdict is Verdict.HEALTHY
        return replace(found, why=f"{found.why} {note}") if is_noted else found
    figures = "; ".join(_figures(name, watched[name]) for name in (view or "", *others))
    return replace(
        found,
        verdict=Verdict.CANNOT_TELL,
        regime=None,
        prompts_needed=None,
        why=f"The views disagree: {figures}.",
    )


def _figures(view: str, watched: Watched) -> str:
    report = watched.report
    return (
        f"{view.replace('_', ' ')} says {watched.verdict} (MI {report.mi_estimate:.2f} nats a "
        f"token, retrieval {report.retrieval_accuracy:.2f})"
    )


class CollapseWatch:
    """Feed it the reports of one view, oldest first."""

    def __init__(
        self,
        *,
        ema_decay: float = 0.9,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        alarm: CollapseAlarm | None = None,
    ) -> None:
        self._ema = ZScoreEMA(ema_decay)
        self._verdicts = VerdictTracker(thresholds)
        self._alarm = alarm or CollapseAlarm()

    @property
    def alarm(self) -> Alarm | None:
        """The first alarm of the series."""
        return self._alarm.alarm

    def update(
        self, step: int | None, report: CollapseReport, *, prompts: Iterable[bytes] = ()
    ) -> Watched:
        """Take in the next look; one without a step number is not checked for an alarm.

        `prompts` are keys of the prompts that have reasonings: looks at the same ones are not
        independent. None: every look has new ones.
        """
        report = self._ema.update(report)
        alarm = None
        if step is not None:
            alarm = self._alarm.update(
                step,
                report.mi_estimate,
                report.conditional_entropy_est,
                report.standard_errors.get("mi_estimate"),
                report.mean_length,
            )
        found, regime = self._verdicts.update(Level.of(report, prompts))
        return Watched(
            report=report,
            verdict=found.verdict,
            why=found.why,
            prompts_needed=found.prompts_needed,
            regime=regime,
            alarm=alarm,
            has_nothing_to_lose=self._alarm.has_nothing_to_lose,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain JSON."""
        return {
            "ema": self._ema.state_dict(),
            "verdicts": self._verdicts.state_dict(),
            "alarm": self._alarm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ema.load_state_dict(state["ema"])
        self._verdicts.load_state_dict(state["verdicts"])
        self._alarm.load_state_dict(state["alarm"])


class ZScoreEMA:
    """Running marginal std of a run: sigma_t = decay * sigma_(t-1) + (1 - decay) * sigma."""

    def __init__(self, decay: float = 0.9) -> None:
        if not 0.0 <= decay < 1.0:
            raise MooredError(f"decay must lie in [0, 1), got {decay}")
        self.decay = decay
        self._std: float | None = None
        self._std_seq: float | None = None

    def update(self, report: CollapseReport) -> CollapseReport:
        """Take in a report; return it with its `*_ema` fields filled."""
        self._std = self._smooth(self._std, report.marginal_std)
        self._std_seq = self._smooth(self._std_seq, report.marginal_std_seq)
        return replace(
            report,
            marginal_std_ema=self._std,
            marginal_std_ema_seq=self._std_seq,
            mi_zscore_ema=report.mi_estimate / (self._std + STD_EPS),
            mi_zscore_ema_seq=report.mi_seq_estimate / (self._std_seq + STD_EPS),
        )

    def _smooth(self, before: float | None, now: float) -> float:
        return float(now if before is None else self.decay * before + (1.0 - self.decay) * now)

    def state_dict(self) -> dict[str, float | None]:
        return {"std": self._std, "std_seq": self._std_seq}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self._std, self._std_seq = state["std"], state["std_seq"]


class VerdictTracker:
    """Follows one run: remembers its start, its last looks and what was said of them."""

    def __init__(self, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> None:
        self.thresholds = thresholds
        self._looks: list[Level] = []
        """The last ones, as many as are pooled."""
        self._start: Level | None = None
        self._verdict: Verdict | None = None
        """The last one that could tell."""
        self._reversal: Verdict | None = None
        """The opposite verdict, when the last look gave it: two in a row overturn the first."""
        self._regime: Regime | None = None

    def update(self, look: Level) -> tuple[Judgement, Regime | None]:
        """Take in the next look; the first one sets the start, or a few of them together."""
        holds_first = len(self._looks) < max(POOLED_LOOKS)
        self._looks = [*self._looks, look][-max(POOLED_LOOKS) :]
        found = judge_series(
            self._looks, start=self._start, previous=self._verdict, thresholds=self.thresholds
        )
        if self._start is None and holds_first:
            self._start = first_level(self._looks, self.thresholds)
        found = self._twice(found)
        regime = regime_of(
            found.verdict,
            look.entropy,
            start_entropy=None if self._start is None else self._start.entropy,
            previous=self._regime,
            thresholds=self.thresholds,
        )
        if regime is not None:
            self._verdict, self._regime = found.verdict, regime
        return found, regime

    def _twice(self, found: Judgement) -> Judgement:
        """A verdict that contradicts the last one counts when the next look gives it again."""
        is_reversal = self._verdict is not None and found.verdict not in (
            self._verdict,
            Verdict.CANNOT_TELL,
        )
        repeated = found.verdict is self._reversal
        self._reversal = found.verdict if is_reversal else None
        if not is_reversal or repeated:
            return found
        why = f"{found.why} The looks before said {self._verdict}: the next look decides."
        return Judgement(verdict=Verdict.CANNOT_TELL, why=why)

    def state_dict(self) -> dict[str, Any]:
        return {
            "looks": [asdict(look) for look in self._looks],
            "start": None if self._start is None else asdict(self._start),
            "verdict": self._verdict,
            "reversal": self._reversal,
            "regime": self._regime,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._looks = [Level.read(look) for look in state["looks"]]
        self._start = None if state["start"] is None else Level.read(state["start"])
        self._verdict = None if state["verdict"] is None else Verdict(state["verdict"])
        self._reversal = None if state["reversal"] is None else Verdict(state["reversal"])
        self._regime = None if state["regime"] is None else Regime(state["regime"])
