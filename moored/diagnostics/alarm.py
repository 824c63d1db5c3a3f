"""The alarm for template collapse, where MI falls while entropy does not.

A one-sided CUSUM on the MI series against the highest level the run has held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from moored.diagnostics.report import Regime
from moored.errors import MooredError

SMOOTH = 3
"""Points in the running median that counts as a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A change point: at `step`, MI had fallen too far for too long."""

    step: int
    kind: Regime
    """`template_collapse` when entropy did not fall, `low_entropy_collapse` when it fell too."""
    mi_level: float
    mi_reference: float
    cusum: float


class CollapseAlarm:
    """Feed one measurement at a time; the first alarm is kept.

    S = max(0, S + (reference - MI) / sigma - slack); the alarm goes off when S > threshold and the
    level is down by at least `min_drop` of the reference. sigma is the noise of the series, from
    the median absolute difference of successive points, at least `min_noise` of the reference. The
    reference is the highest level, or the first measurement less two sigma. S counts from the
    `warmup`-th on.
    """

    def __init__(
        self,
        *,
        slack: float = 2.0,
        threshold: float = 5.0,
        min_drop: float = 0.5,
        min_noise: float = 0.03,
        entropy_share: float = 0.5,
        warmup: int = SMOOTH,
    ) -> None:
        if warmup < SMOOTH:
            raise MooredError(f"warmup must be at least {SMOOTH} measurements, got {warmup}")
        if not 0.0 < min_drop < 1.0:
            raise MooredError(f"min_drop must lie in (0, 1), got {min_drop}")
        self.slack = slack
        self.threshold = threshold
        self.min_drop = min_drop
        self.min_noise = min_noise
        self.entropy_share = entropy_share
        self.warmup = warmup
        self.alarm: Alarm | None = None
        self._mi: list[float] = []
        self._entropy: list[float] = []
        self._reference: float | None = None
        self._cusum = 0.0

    def update(
        self,
        step: int,
        mi: float,
        conditional_entropy: float,
        standard_error: float | None = None,
    ) -> Alarm | None:
        """Take in one measurement; returns the alarm when it goes off, once."""
        if not (np.isfinite(mi) and np.isfinite(conditional_entropy)):
            raise MooredError(
                f"the alarm needs finite numbers, got mi={mi}, entropy={conditional_entropy} at "
                f"step {step}; leave out measurements that were skipped"
            )
        mi = float(mi)
        self._mi.append(mi)
        self._entropy.append(float(conditional_entropy))
        if len(self._mi) < self.warmup:
            return None
        level = float(np.median(self._mi[-SMOOTH:]))
        self._reference = level if self._reference is None else max(self._reference, level)
        # A run may collapse between its first look and its second: the first counts, less noise.
        noise = max(_noise(self._mi), self.min_noise * abs(self._reference), 1e-12)
        reference = max(self._reference, self._mi[0] - 2.0 * noise)
        self._cusum = max(0.0, self._cusum + (reference - mi) / noise - self.slack)
        dropped = reference > 0.0 and level <= (1.0 - self.min_drop) * reference
        if self.alarm is not None or self._cusum <= self.threshold or not dropped:
            return None
        self.alarm = Alarm(
            step=int(step),
            kind=self._kind(),
            mi_level=level,
            mi_reference=reference,
            cusum=self._cusum,
        )
        return self.alarm

    def _kind(self) -> Regime:
        start, now = np.median(self._entropy[:SMOOTH]), np.median(self._entropy[-SMOOTH:])
        stands = now >= self.entropy_share * start
        return Regime.TEMPLATE_COLLAPSE if stands else Regime.LOW_ENTROPY_COLLAPSE

    def state_dict(self) -> dict[str, object]:
        alarm = None
        if self.alarm is not None:
            alarm = {name: getattr(self.alarm, name) for name in Alarm.__dataclass_fields__}
        return {
            "mi": list(self._mi),
            "entropy": list(self._entropy),
            "reference": self._reference,
            "cusum": self._cusum,
            "alarm": alarm,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        mi, entropy, alarm = state["mi"], state["entropy"], cast(Any, state["alarm"])
        reference, cusum = state["reference"], state["cusum"]
        assert isinstance(mi, list) and isinstance(entropy, list)
        assert reference is None or isinstance(reference, float)
        assert isinstance(cusum, float)
        self._mi, self._entropy = list(mi), list(entropy)
        self._reference, self._cusum = reference, cusum
        self.alarm = None
        if alarm is not None:
            self.alarm = Alarm(**{**alarm, "kind": Regime(alarm["kind"])})


def find_alarm(
    series: Iterable[tuple[int, float, float]], alarm: CollapseAlarm | None = None
) -> Alarm | None:
    """The first alarm in a finished series of (step, MI, conditional entropy)."""
    watch = alarm or CollapseAlarm()
    for step, mi, entropy in series:
        watch.update(step, mi, entropy)
    return watch.alarm


def _noise(values: list[float]) -> float:
    """Standard deviation of the noise: successive differences are insensitive to a slow trend."""
    steps = np.diff(values)
    return float(1.4826 * np.median(np.abs(steps)) / np.sqrt(2.0))
