"""What looks at a run say of its input dependence: one alone, or several pooled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moored.diagnostics.report import CollapseReport
from moored.diagnostics.resampling import t_quantile

CONFIDENCE = 0.99
"""Of the intervals: a run has a hundred looks, and none should be called wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What a verdict is read from: one look, or several pooled. Plain numbers, ready for JSON."""

    num_looks: int
    num_prompts: int
    """Prompts with reasonings, over all looks."""
    num_degrees: int
    """Degrees of freedom of the standard errors: prompts minus looks; 0: they are not known."""
    mi: float
    """Nats a token."""
    mi_se: float
    ceiling_share: float
    """MI per sequence over log N."""
    ceiling_share_se: float
    dependence: float
    """Retrieval corrected for chance."""
    dependence_se: float
    entropy: float
    p_value: float | None
    length: float | None = None
    """Tokens of a reasoning; None: not known."""
    prompts: tuple[int, ...] = ()
    """A number for each of the prompts, the same whenever it comes again; none: not known."""

    @classmethod
    def of(cls, report: CollapseReport, prompts: Iterable[bytes] = ()) -> Level:
        """The level of one look; `prompts` are keys of those that have reasonings."""
        chance, errors = 1.0 / report.num_prompts, report.standard_errors
        is_known = "mi_estimate" in errors
        return cls(
            num_looks=1,
            num_prompts=report.num_used_prompts,
            num_degrees=report.num_used_prompts - 1 if is_known else 0,
            mi=report.mi_estimate,
            mi_se=errors.get("mi_estimate", 0.0),
            ceiling_share=report.mi_seq_estimate / report.mi_upper_bound,
            ceiling_share_se=errors.get("mi_seq_estimate", 0.0) / report.mi_upper_bound,
            dependence=report.dependence,
            dependence_se=errors.get("retrieval_accuracy", 0.0) / (1.0 - chance),
            entropy=report.conditional_entropy_est,
            p_value=report.p_values.get("mi_seq_estimate"),
            length=report.mean_length,
            prompts=tuple(sorted({int.from_bytes(key[:6]) for key in prompts})),
        )

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Level:
        """From `asdict`, also by way of JSON."""
        return cls(**{**state, "prompts": tuple(state["prompts"])})

    def half_width(self, standard_error: float) -> float:
        """Half of a 99 % interval; infinite where the standard error is not known."""
        if self.num_degrees < 1:
            return math.inf
        return t_quantile(self.num_degrees, CONFIDENCE) * standard_error


def pool(looks: Sequence[Level]) -> Level:
    """One level from several looks: means weighted by their prompts, p-values after Fisher.

    Prompts and not precision are the weights: the standard error of a small look is as uncertain
    as its mean, and low looks would get the small errors. The scatter of the looks themselves
    counts where it is larger than their standard errors say; where one of these is not known, its
    degrees of freedom do. Looks at the same prompts say no more about others than one of them does.
    """
    if len(looks) == 1:
        return looks[0]
    total = sum(look.num_prompts for look in looks)
    shares = np.array([look.num_prompts / total for look in looks])
    fields: dict[str, float] = {}
    known = {prompt for look in looks for prompt in look.prompts}
    num_prompts = len(known) + sum(look.num_prompts for look in looks if not look.prompts)
    most = max(look.num_degrees for look in looks)
    num_degrees = max(num_prompts - sum(look.num_looks for look in looks), most)
    if any(look.num_degrees < 1 for look in looks):
        num_degrees = len(looks) - 1
    overlap = np.array([[_overlap(look, other) for other in looks] for look in looks])
    np.fill_diagonal(overlap, 1.0)
    for name in ("mi", "ceiling_share", "dependence"):
        values = np.array([getattr(look, name) for look in looks])
        errors = np.array([getattr(look, f"{name}_se") for look in looks])
        parts = shares * errors
        mean, within = float(shares @ values), math.sqrt(float(parts @ overlap @ parts))
        scatter = math.sqrt(float(shares @ (values - mean) ** 2) / (len(looks) - 1))
        fields |= {name: mean, f"{name}_se": max(within, scatter)}
        if scatter > within:
            num_degrees = len(looks) - 1
    lengths = [look.length for look in looks if look.length is not None]
    return Level(
        length=float(shares @ np.array(lengths)) if len(lengths) == len(looks) else None,
        num_looks=sum(look.num_looks for look in looks),
        num_prompts=num_prompts,
        num_degrees=num_degrees,
        prompts=tuple(sorted(known)),
        entropy=float(shares @ np.array([look.entropy for look in looks])),
        p_value=_fisher([look.p_value for look in looks]),
        **fields,
    )


def _overlap(look: Level, other: Level) -> float:
    """Correlation of the means of two looks, by the prompts that they share."""
    shared = len(set(look.prompts) & set(other.prompts))
    return shared / math.sqrt(len(look.prompts) * len(other.prompts)) if shared else 0.0


def _fisher(p_values: Sequence[float | None]) -> float | None:
    """Chance of p-values as small together: a chi-squared of twice as many degrees as values."""
    known = [p for p in p_values if p is not None]
    if len(known) < len(p_values):
        return None
    half = -sum(math.log(p) for p in known)
    terms = (half**i / math.factorial(i) for i in range(len(known)))
    return min(1.0, math.exp(-half) * sum(terms))
