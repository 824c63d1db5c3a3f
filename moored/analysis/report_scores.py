"""The score matrices of one run, early and late, as a section of its report."""

from __future__ import annotations

import numpy as np

from moored.analysis.heat_maps import gains, score_map
from moored.analysis.report import Drawn, Section
from moored.analysis.report_data import RunData
from moored.types import ScoreMatrix

TEXT = (
    "How much likelier, in nats per token, each reasoning is under a prompt than under the mean of "
    "all prompts. Reasonings are sorted by the prompt that they were written for, whose cells have "
    "a frame: reasoning that depends on its prompt shows a blue diagonal, and a template is pale "
    "everywhere. In observation swap the columns are observations of the same turn, put in after "
    "the reasoning's own history."
)
MIN_LIMIT = 0.02
"""Nats per token at which colours end at least: noise is to look like noise."""


def score_maps(run: RunData) -> Section:
    """The first stored look and the last, side by side for each view."""
    first, last = min(run.scores, default=0), max(run.scores, default=0)
    stages = {"early": first, "late": last} if first < last else {"only look": last}
    # One scale for all, or a collapsed look would seem as varied as a healthy one.
    limit = _limit([matrix for views in run.scores.values() for matrix in views.values()])
    figures = [
        Drawn(
            slug=f"scores_{view}_{stage}".replace("/", "_").replace(" ", "_"),
            title=f"{stage.capitalize()}: step {step}, {view.replace('_', ' ')}",
            chart=score_map(run.scores[step][view], limit),
        )
        for view in dict.fromkeys(view for views in run.scores.values() for view in views)
        for stage, step in stages.items()
        if view in run.scores.get(step, {})
    ]
    return Section(
        title="Scores of reasonings under prompts", text=TEXT, figures=tuple(figures), columns=2
    )


def _limit(matrices: list[ScoreMatrix]) -> float:
    peaks = [gains(matrix).max(axis=1) for matrix in matrices]
    return max(float(np.quantile(np.concatenate(peaks), 0.95)), MIN_LIMIT) if peaks else MIN_LIMIT
