"""One series of reports over a run: smoothing, regime and alarm, for every trainer alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moored.diagnostics.alarm import Alarm, CollapseAlarm
from moored.diagnostics.regimes import Regime, RegimeTracker
from moored.diagnostics.report import CollapseReport, ZScoreEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What one look says when those before it are known."""

    report: CollapseReport
    """With its `*_ema` fields filled."""
    regime: Regime
    alarm: Alarm | None
    """Set in the look in which the alarm goes off."""


class CollapseWatch:
    """Feed it the reports of one view, oldest first."""

    def __init__(
        self,
        *,
        ema_decay: float = 0.9,
        regimes: RegimeTracker | None = None,
        alarm: CollapseAlarm | None = None,
    ) -> None:
        self._ema = ZScoreEMA(ema_decay)
        self._regimes = regimes or RegimeTracker()
        self._alarm = alarm or CollapseAlarm()

    @property
    def alarm(self) -> Alarm | None:
        """The first alarm of the series."""
        return self._alarm.alarm

    def update(self, step: int | None, report: CollapseReport) -> Watched:
        """Take in the next look; one without a step has no place in time, so no alarm."""
        report = self._ema.update(report)
        alarm = None
        if step is not None:
            alarm = self._alarm.update(step, report.mi_estimate, report.conditional_entropy_est)
        return Watched(report=report, regime=self._regimes.update(report), alarm=alarm)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain JSON."""
        return {
            "ema": self._ema.state_dict(),
            "regimes": self._regimes.state_dict(),
            "alarm": self._alarm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ema.load_state_dict(state["ema"])
        self._regimes.load_state_dict(state["regimes"])
        self._alarm.load_state_dict(state["alarm"])
