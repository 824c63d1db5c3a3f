"""The alarm for template collapse, where MI falls while entropy does not.

It goes off when the *level*, the mean of the last three looks, is at most 38 % of what the run has
*held* in a quarter of its looks. The two bars are set for the worst series that is still promised:
noise of a fifth of the mean, autocorrelated with 0.8, which wanders far and stays away for long
(docs/results/alarm.md). Noisier looks lower the bar. Only a level that is clearly above zero, by
the errors of its own looks, is a reference: most looks of a run without MI have tiny errors, and a
chance rise among them, whose errors are large, is not something that was lost. MI is per token;
where reasonings have become much longer, MI times length must have fallen, too.
Shape legend: S series, T looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moored.diagnostics.report import Regime, length_growth
from moored.errors import MooredError

LEVEL_LOOKS = 3
"""Looks whose mean counts as a level."""
MIN_LOOKS = 4
"""Looks before an alarm may go off."""
RECENT_LOOKS = 32
"""A run that rose late is held to what it held lately, too."""
FIRST_LOOKS = 8
"""Looks for which the first one, alone, is a reference: a run may collapse before its second."""
DEFAULT_NOISE = 0.2
"""Noise of the first look as a share of it, when its standard error is not known."""
LEAST_NOISE = 0.1
"""And the least that is believed of one look, whatever its standard error."""

NOTHING_TO_LOSE = "MI was not clearly above 0 from the start: nothing to lose"
"""Said in the place of an alarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """At `step`, MI had fallen too far from what the run had held."""

    step: int
    kind: Regime
    """`template_collapse` when entropy did not fall, `low_entropy_collapse` when it fell too."""
    mi_level: float
    """Mean of the last three looks."""
    mi_level_se: float
    mi_reference: float
    """What the run had held; or its first look, minus two standard errors."""


@dataclass(frozen=True, slots=True, eq=False)
class Fall:
    """The newest level of each series against what that series has held."""

    level_S: np.ndarray
    level_se_S: np.ndarray
    reference_S: np.ndarray
    limit_S: np.ndarray
    """The alarm goes off at a level of at most this; -inf where there is nothing to fall from."""
    nothing_to_lose_S: np.ndarray
    """Neither the first look nor a level so far was clearly above zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """The bars of the alarm, as shares of a reference."""

    max_share: float = 0.38
    """Of the level held in a quarter of the looks: the alarm goes off at or below this."""
    max_share_of_first: float = 0.28
    """Of the first look minus two standard errors; one look is a weak reference."""
    min_errors: float = 4.5
    """Standard errors of the level that a fall must span: the looks' own noise is white."""
    min_errors_above_zero: float = 3.0
    """Standard errors, those of its own looks, by which a level must be above zero to be a
    reference. Chance gets there once in 700 levels; the stored runs that fell had 3.5 or more."""
    quarter: int = 4
    """A level is held when one look in so many reached it."""

    def __post_init__(self) -> None:
        for name in ("max_share", "max_share_of_first"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise MooredError(f"{name} must lie in (0, 1), got {getattr(self, name)}")

    def apply(self, mi_ST: np.ndarray, errors_ST: np.ndarray | None) -> Fall:
        """Look at the newest of at least `MIN_LOOKS` looks; `errors_ST` are standard errors."""
        levels_ST = _mean_of_three(mi_ST)
        level_S, error_S = levels_ST[:, -1], _noise(mi_ST, errors_ST) / math.sqrt(LEVEL_LOOKS)
        shown_ST = self._shown(levels_ST, _level_errors(levels_ST, error_S, errors_ST))
        nothing_S = (shown_ST == 0.0).all(axis=1)
        held_S = self._held(shown_ST)
        if levels_ST.shape[1] > RECENT_LOOKS:
            held_S = np.maximum(held_S, self._held(shown_ST[:, -RECENT_LOOKS:]))
        limit_S = self._limit(held_S, self.max_share, error_S)
        if mi_ST.shape[1] > FIRST_LOOKS:
            return Fall(level_S, error_S, held_S, limit_S, nothing_S)
        first_S = mi_ST[:, 0]
        own_S = DEFAULT_NOISE * np.abs(first_S) if errors_ST is None else errors_ST[:, 0]
        first_S = self._shown(first_S, own_S)
        first_S = first_S - 2.0 * np.maximum(own_S, LEAST_NOISE * first_S)
        first_limit_S = self._limit(first_S, self.max_share_of_first, error_S)
        reference_S = np.where(first_limit_S > limit_S, first_S, held_S)
        nothing_S &= np.isneginf(first_limit_S)
        return Fall(level_S, error_S, reference_S, np.maximum(limit_S, first_limit_S), nothing_S)

    def _shown(self, mi: np.ndarray, own_errors: np.ndarray) -> np.ndarray:
        """MI where it is clearly above zero, and 0 elsewhere."""
        return np.where(mi > self.min_errors_above_zero * own_errors, mi, 0.0)

    def _held(self, levels_ST: np.ndarray) -> np.ndarray:
        """The level that a quarter of the looks reached: one outlying look does not make it."""
        place = math.ceil(levels_ST.shape[1] / self.quarter)
        return -np.partition(-levels_ST, place - 1, axis=1)[:, place - 1]

    def _limit(self, reference_S: np.ndarray, share: float, error_S: np.ndarray) -> np.ndarray:
        room_S = reference_S - self.min_errors * error_S
        return np.where(room_S > 0.0, np.minimum(share * reference_S, room_S), -np.inf)


def _mean_of_three(values_ST: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(values_ST, LEVEL_LOOKS, axis=1)
    return windows.mean(axis=2)


def _level_errors(
    levels_ST: np.ndarray, error_S: np.ndarray, errors_ST: np.ndarray | None
) -> np.ndarray:
    """Standard error of each level: of its own looks where theirs are known, else the typical."""
    if errors_ST is None:
        return np.broadcast_to(error_S[:, None], levels_ST.shape)
    return np.sqrt(_mean_of_three(errors_ST**2) / LEVEL_LOOKS)


def _noise(mi_ST: np.ndarray, errors_ST: np.ndarray | None) -> np.ndarray:
    """Noise of one look: its standard error, else from successive differences.

    The median difference does not feel a single fall, and hardly a slow one.
    """
    if errors_ST is not None:
        return np.median(errors_ST, axis=1)
    return 1.4826 * np.median(np.abs(np.diff(mi_ST, axis=1)), axis=1) / math.sqrt(2.0)


class CollapseAlarm:
    """Feed one look at a time; the first alarm is kept."""

    def __init__(self, rule: AlarmRule | None = None, *, entropy_share: float = 0.5) -> None:
        self.rule = rule or AlarmRule()
        self.entropy_share = entropy_share
        """Entropy below this share of its start has fallen, too."""
        self.alarm: Alarm | None = None
        self.has_nothing_to_lose = False
        """After `MIN_LOOKS` looks: MI was never clearly above zero, so it cannot fall."""
        self._mi: list[float] = []
        self._entropy: list[float] = []
        self._errors: list[float | None] = []
        self._lengths: list[float | None] = []

    def update(
        self,
        step: int,
        mi: float,
        conditional_entropy: float,
        standard_error: float | None = None,
        length: float | None = None,
    ) -> Alarm | None:
        """Take in one look; returns the alarm when it goes off, once.

        `length` is the mean number of tokens of a reasoning.
        """
        given = (mi, conditional_entropy, 0.0 if standard_error is None else standard_error)
        if not all(map(math.isfinite, given)):
            raise MooredError(
                f"the alarm needs finite numbers, got mi={mi}, entropy={conditional_entropy}, "
                f"standard_error={standard_error} at step {step}; leave out looks that were skipped"
            )
        self._mi.append(float(mi))
        self._entropy.append(float(conditional_entropy))
        self._errors.append(None if standard_error is None else float(standard_error))
        self._lengths.append(None if length is None else float(length))
        if self.alarm is not None or len(self._mi) < MIN_LOOKS:
            return None
        errors_ST = self._known_errors()
        found = self.rule.apply(np.array([self._mi]), errors_ST)
        self.has_nothing_to_lose = bool(found.nothing_to_lose_S[0])
        if found.level_S[0] > found.limit_S[0] or self._is_longer_only(errors_ST):
            return None
        self.alarm = Alarm(
            step=int(step),
            kind=self._kind(),
            mi_level=float(found.level_S[0]),
            mi_level_se=float(found.level_se_S[0]),
            mi_reference=float(found.reference_S[0]),
        )
        return self.alarm

    def _known_errors(self) -> np.ndarray | None:
        """(1, T) standard errors; None where fewer than half of the looks have one.

        A look without, e.g. at two prompts, counts as typical: it does not undo those of others.
        """
        known = [error for error in self._errors if error is not None]
        if 2 * len(known) < len(self._errors):
            return None
        typical = float(np.median(known))
        return np.array([[typical if error is None else error for error in self._errors]])

    def _is_longer_only(self, errors_ST: np.ndarray | None) -> bool:
        """True where reasonings grew much longer, and MI times length has not fallen."""
        lengths = [length for length in self._lengths if length is not None]
        if len(lengths) < len(self._mi):
            return False
        start, now = (float(np.mean(part)) for part in (lengths[:3], lengths[-LEVEL_LOOKS:]))
        if length_growth(now, start) == 1.0:
            return False
        length_ST = np.array([lengths])
        errors_ST = None if errors_ST is None else errors_ST * length_ST
        found = self.rule.apply(np.array([self._mi]) * length_ST, errors_ST)
        return bool(found.level_S[0] > found.limit_S[0])

    def _kind(self) -> Regime:
        start, now = (np.median(part) for part in (self._entropy[:3], self._entropy[-3:]))
        stands = now >= self.entropy_share * start
        return Regime.TEMPLATE_COLLAPSE if stands else Regime.LOW_ENTROPY_COLLAPSE

    def state_dict(self) -> dict[str, Any]:
        return {
            "mi": list(self._mi),
            "entropy": list(self._entropy),
            "errors": list(self._errors),
            "lengths": list(self._lengths),
            "alarm": None if self.alarm is None else asdict(self.alarm),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mi, self._entropy = list(state["mi"]), list(state["entropy"])
        self._errors, alarm = list(state["errors"]), state["alarm"]
        # A run that was begun before lengths were kept goes on without them.
        self._lengths = list(state.get("lengths", [None] * len(self._mi)))
        self.alarm = None
        if alarm is not None:
            self.alarm = Alarm(**{**alarm, "kind": Regime(alarm["kind"])})


def find_alarm(
    series: Iterable[tuple[int, float, float]], alarm: CollapseAlarm | None = None
) -> Alarm | None:
    """The first alarm in a finished series of (step, MI, conditional entropy)."""
    watch = alarm or CollapseAlarm()
    for look in series:
        watch.update(*look)
    return watch.alarm
