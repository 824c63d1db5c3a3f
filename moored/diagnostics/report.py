"""What one measurement of input dependence says: `CollapseReport`, with its uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

LONGER = 1.5
"""Where reasonings grew by this factor, MI has fallen only when MI times their length has, too."""
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


class Verdict(StrEnum):
    """Does reasoning depend on its prompt?"""

    HEALTHY = "healthy"
    COLLAPSED = "collapsed"
    CANNOT_TELL = "cannot_tell"


class Regime(StrEnum):
    """Where a measurement lies on the plane of diversity and input dependence."""

    DIVERSE = "diverse"
    TEMPLATE_COLLAPSE = "template_collapse"
    COMPRESSED = "compressed"
    LOW_ENTROPY_COLLAPSE = "low_entropy_collapse"

    @property
    def is_diverse(self) -> bool:
        return self in (Regime.DIVERSE, Regime.TEMPLATE_COLLAPSE)


def length_growth(length: float | None, start: float | None) -> float:
    """How many times longer reasonings are than at the start; 1 below `LONGER`, or not known.

    MI per token is diluted by length: what a longer reasoning says of its prompt is the same when
    MI times length is.
    """
    if length is None or not start:
        return 1.0
    return length / start if length >= LONGER * start else 1.0


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
    """N: columns that each reasoning was scored under; the ceiling of MI is log N."""
    num_used_prompts: int
    """Prompts that have reasonings, those of one task counted once: the independent units."""
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
    verdict: Verdict = Verdict.CANNOT_TELL
    """From this report alone; `CollapseWatch` follows a run."""
    why: str = ""
    """One sentence that gives the verdict its reason."""
    regime: Regime | None = None
    """None when the verdict is `cannot_tell`."""
    mean_length: float | None = None
    """Tokens of a reasoning; None: a record that does not know."""
    control_mi: float | None = None
    """Nats per token that were taken off `mi_estimate` because another task's reasoning gains them
    in the same contexts, too; None where there is no control."""
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    """By metric name, prompts as independent units; empty when fewer than 2 have reasonings, and
    without MI and retrieval when fewer than 3 have: two are one comparison."""
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
        if self.control_mi is not None:
            logged["mi_control"] = self.control_mi
        if "mi_estimate" in self.standard_errors:
            logged["mi_estimate_se"] = self.standard_errors["mi_estimate"]
        return {f"{prefix}/{name}": float(value) for name, value in logged.items()}

    def to_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return asdict(self) | {
            "dependence": self.dependence,
            "retrieval_at": {str(k): v for k, v in self.retrieval_at.items()},
        }
