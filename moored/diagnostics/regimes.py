"""Four reasoning regimes: is reasoning tied to its input, and is it diverse?

|  | input dependence high | input dependence low |
|---|---|---|
| diversity high | diverse | template collapse |
| diversity low | compressed | low-entropy collapse |

Thresholds are relative to chance and to the run's own start, and have hysteresis: a regime that
was entered at a threshold is left only well beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from moored.errors import MooredError


class Regime(StrEnum):
    DIVERSE = "diverse"
    TEMPLATE_COLLAPSE = "template_collapse"
    COMPRESSED = "compressed"
    LOW_ENTROPY_COLLAPSE = "low_entropy_collapse"

    @property
    def is_grounded(self) -> bool:
        """True where reasoning still depends on its input."""
        return self in (Regime.DIVERSE, Regime.COMPRESSED)

    @property
    def is_diverse(self) -> bool:
        return self in (Regime.DIVERSE, Regime.TEMPLATE_COLLAPSE)


class Measured(Protocol):
    """What a regime is read from; `CollapseReport` has it."""

    @property
    def mi_estimate(self) -> float: ...
    @property
    def conditional_entropy_est(self) -> float: ...
    @property
    def dependence(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeThresholds:
    """Where the axes are cut. The entropy is per token, in nats."""

    min_dependence: float = 0.1
    """Chance-corrected retrieval below which reasoning does not tell its prompt."""
    min_mi_of_start: float = 0.2
    """Share of the run's first MI below which input dependence counts as lost."""
    min_entropy_of_start: float = 0.5
    """Share of the run's first H(Z|X) below which diversity counts as lost."""
    min_entropy_nats: float = 0.05
    """H(Z|X) per token that is low whatever the start was."""
    hysteresis: float = 1.5
    """To leave a low state a quantity must exceed its threshold by this factor."""

    def __post_init__(self) -> None:
        if self.hysteresis < 1.0:
            raise MooredError(f"hysteresis must be >= 1, got {self.hysteresis}")


DEFAULT_THRESHOLDS = RegimeThresholds()


def classify(
    report: Measured,
    *,
    start_mi: float | None = None,
    start_entropy: float | None = None,
    previous: Regime | None = None,
    thresholds: RegimeThresholds = DEFAULT_THRESHOLDS,
) -> Regime:
    """Name the regime of one measurement, given the run's start and its previous regime."""
    leave = thresholds.hysteresis
    mi_factor = leave if previous is not None and not previous.is_grounded else 1.0
    entropy_factor = leave if previous is not None and not previous.is_diverse else 1.0
    is_grounded = report.dependence >= thresholds.min_dependence * mi_factor
    if start_mi is not None:
        is_grounded &= report.mi_estimate >= thresholds.min_mi_of_start * start_mi * mi_factor
    floor = thresholds.min_entropy_nats
    if start_entropy is not None:
        floor = max(floor, thresholds.min_entropy_of_start * start_entropy)
    is_diverse = report.conditional_entropy_est >= floor * entropy_factor
    if is_grounded:
        return Regime.DIVERSE if is_diverse else Regime.COMPRESSED
    return Regime.TEMPLATE_COLLAPSE if is_diverse else Regime.LOW_ENTROPY_COLLAPSE


class RegimeTracker:
    """Follows one run: remembers its start and its last regime."""

    def __init__(self, thresholds: RegimeThresholds = DEFAULT_THRESHOLDS) -> None:
        self.thresholds = thresholds
        self._start_mi: float | None = None
        self._start_entropy: float | None = None
        self._regime: Regime | None = None

    def update(self, report: Measured) -> Regime:
        """Take in the next measurement; the first one sets the start."""
        if self._start_mi is None:
            self._start_mi = float(report.mi_estimate)
            self._start_entropy = float(report.conditional_entropy_est)
        self._regime = classify(
            report,
            start_mi=self._start_mi,
            start_entropy=self._start_entropy,
            previous=self._regime,
            thresholds=self.thresholds,
        )
        return self._regime

    def state_dict(self) -> dict[str, object]:
        return {
            "start_mi": self._start_mi,
            "start_entropy": self._start_entropy,
            "regime": self._regime,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        start_mi, start_entropy, regime = (
            state[key] for key in ("start_mi", "start_entropy", "regime")
        )
        assert start_mi is None or isinstance(start_mi, float)
        assert start_entropy is None or isinstance(start_entropy, float)
        self._start_mi, self._start_entropy = start_mi, start_entropy
        self._regime = None if regime is None else Regime(str(regime))
