"""What one measurement of input dependence says: `CollapseReport`, and its regime.

|  | input dependence high | input dependence low |
|---|---|---|
| diversity high | diverse | template collapse |
| diversity low | compressed | low-entropy collapse |

Thresholds are relative to chance and to the run's own start, and have hysteresis: a regime that
was entered at a threshold is left only well beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Protocol

from moored.errors import MooredError

STD_EPS = 1e-3
"""Added to the marginal std in every z-score."""

LOGGED = (
    "mi_estimate",
    "mi_seq_estimate",
    "mi_upper_bound",
    "conditional_entropy_est",
    "conditional_entropy_seq_est",
    "reasoning_entropy_est",
    "reasoning_entropy_seq_est",
    "matched_log_prob_mean",
    "marginal_log_prob_mean",
    "marginal_std",
    "marginal_std_seq",
    "marginal_std_ema",
    "marginal_std_ema_seq",
    "mi_zscore",
    "mi_zscore_seq",
    "mi_zscore_ema",
    "mi_zscore_ema_seq",
)
"""Fields that are logged as they are, under RAGEN's names; retrieval is logged beside them."""


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


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseReport:
    """Input dependence of reasoning, measured on M reasonings and N distinct prompts.

    Fields named `*_est` and `mi_estimate` are means over reasonings of per-token quantities,
    `*_seq_*` of per-sequence sums; all in nats.
    """

    num_prompts: int
    num_reasonings: int
    num_merged_prompts: int
    """Columns that were dropped because another column is the same prompt."""
    num_empty_reasonings: int
    """Rows that were skipped because they hold no token."""
    mi_estimate: float
    mi_seq_estimate: float
    mi_upper_bound: float
    conditional_entropy_est: float
    conditional_entropy_seq_est: float
    reasoning_entropy_est: float
    reasoning_entropy_seq_est: float
    matched_log_prob_mean: float
    """Per token."""
    marginal_log_prob_mean: float
    """Per token."""
    retrieval_accuracy: float
    retrieval_at: Mapping[int, float]
    """k -> share of reasonings whose prompt is among the k best."""
    marginal_std: float
    marginal_std_seq: float
    mi_zscore: float
    mi_zscore_seq: float
    marginal_std_ema: float
    """Smoothed over the run by `ZScoreEMA`; equal to `marginal_std` before that."""
    marginal_std_ema_seq: float
    mi_zscore_ema: float
    mi_zscore_ema_seq: float
    regime: Regime
    """Read from this report alone; `RegimeTracker` follows a run."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """95 % bootstrap intervals by metric name; empty when `bootstrap=0`."""
    p_values: Mapping[str, float] = field(default_factory=dict)
    """Against the null that reasonings do not depend on prompts; empty when `permutations=0`."""

    @property
    def dependence(self) -> float:
        """Retrieval corrected for chance: 0 at chance, 1 when every prompt is found."""
        chance = 1.0 / self.num_prompts
        return (self.retrieval_accuracy - chance) / (1.0 - chance)

    def metrics(self, prefix: str = "collapse_first_turn_sample") -> dict[str, float]:
        """The logged numbers, under the names RAGEN users know."""
        logged: dict[str, float] = {name: getattr(self, name) for name in LOGGED}
        for k, accuracy in {1: self.retrieval_accuracy, **self.retrieval_at}.items():
            suffix = "" if k == 1 else f"@{k}"
            chance = min(k / self.num_prompts, 1.0)
            logged[f"retrieval_accuracy{suffix}"] = accuracy
            logged[f"retrieval_chance_level{suffix}"] = chance
            logged[f"retrieval_above_chance{suffix}"] = accuracy - chance
        return {f"{prefix}/{name}": float(value) for name, value in logged.items()}

    def to_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return asdict(self) | {
            "dependence": self.dependence,
            "retrieval_at": {str(k): v for k, v in self.retrieval_at.items()},
        }


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
    """Chance-corrected retrieval below which reasoning does not depend on its prompt."""
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
