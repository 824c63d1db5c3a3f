"""A diagnosis as one HTML page: no network, no script, light and dark.

This module gathers what is shown; `page.html` is the template, `page.css` the style. Texts of
rollouts are shown as they are, so the template escapes everything, and the page forbids itself to
load or run anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np

from moored.analysis.diagnosis import Closeup, Diagnosis, Look
from moored.analysis.excerpts import differing_parts
from moored.analysis.findings import (
    METRIC_COLUMNS,
    Grid,
    curve_grid,
    metric_rows,
    notes,
    number,
    regime_name,
    turn_grid,
    verdict_kind,
)
from moored.analysis.svg import SHADES, Cuts, Placed, Point, heat_map, line_chart, plane
from moored.diagnostics.report import CollapseReport, Regime, Verdict
from moored.diagnostics.verdict import DEFAULT_THRESHOLDS
from moored.errors import ConfigError
from moored.runlog.log import write_atomically

MEANINGS = {
    Regime.DIVERSE: "Reasoning depends on its prompt and varies: this is healthy.",
    Regime.COMPRESSED: "Reasoning varies little and is still tied to its prompt: often fine late "
    "in training.",
    Regime.TEMPLATE_COLLAPSE: "Reasoning no longer shows which prompt it was written for, while "
    "its entropy has not fallen: entropy alone shows nothing. Go back to a checkpoint before the "
    "fall; filter by reward variance, with less KL and entropy bonus.",
    Regime.LOW_ENTROPY_COLLAPSE: "Reasoning no longer shows which prompt it was written for, and "
    "hardly varies. Go back to a checkpoint before the fall; filter by reward variance.",
}
MOST_FILES = 6
MOST_EXAMPLES = 3
"""Reasonings on either side."""


def check_can_write(file: Path) -> None:
    """Raise before anything is measured when the page could not be written."""
    if file.is_dir():
        raise ConfigError(f"--html needs a file, got the folder {str(file)!r}")
    if not file.parent.is_dir():
        raise ConfigError(f"--html: the folder {str(file.parent)!r} does not exist; make it first")
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--html: the folder {str(file.parent)!r} cannot be written to")


def write_page(file: Path, diagnosis: Diagnosis, *, files: Sequence[str], model: str) -> None:
    """Write the page, whole or not at all."""
    page = render_page(diagnosis, files=files, model=model)
    # Names of files may hold bytes that are not text, and replies a NUL.
    write_atomically(file, page.encode("utf-8", "replace").decode().replace("\0", "\ufffd"))


def render_page(diagnosis: Diagnosis, *, files: Sequence[str], model: str) -> str:
    """The page; heat map and examples need `diagnose(…, closeups=True)`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    last = diagnosis.looks[-1]
    where = f" of step {last.step}" if len(diagnosis.looks) > 1 and last.step is not None else ""
    template = Environment(
        autoescape=True, trim_blocks=True, undefined=StrictUndefined
    ).from_string(_read("page.html"))
    return template.render(
        style=Markup(_read("page.css")),
        regime=_named(last.regime),
        diagnosis=diagnosis,
        head=_head(diagnosis, files, model),
        metrics={"where": where, "grid": Grid(METRIC_COLUMNS, tuple(metric_rows(last.report)))},
        plane=_plane(diagnosis.looks),
        curves=_curves(diagnosis),
        heat=_heat_maps(diagnosis),
        turns=_turns(diagnosis),
        examples=None if last.closeup is None else _examples(last.closeup),
    )


def _read(name: str) -> str:
    return (package_files("moored.analysis") / name).read_text(encoding="utf-8")


def _head(diagnosis: Diagnosis, files: Sequence[str], model: str) -> dict[str, object]:
    last = diagnosis.looks[-1]
    title = f"Regime: {_named(last.regime)}"
    meaning = last.why if last.regime is None else MEANINGS[last.regime]
    if diagnosis.alarm is not None:
        title += f", alarm at step {diagnosis.alarm.step}"
        meaning += (
            " The alarm: MI fell well below the highest level the run held, for longer than its "
            "noise explains."
        )
    steps = [str(look.step) for look in diagnosis.looks if look.step is not None]
    more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
    facts = {
        "prompts, N": str(last.report.num_prompts),
        "reasonings, M": f"{last.report.num_reasonings} of {last.reasoning_tokens_mean:.0f} tokens",
        "model": model,
        "files": ", ".join(files[:MOST_FILES]) + more,
        "steps": f"{steps[0]} to {steps[-1]}, {len(steps)} looks" if len(steps) > 1 else "",
        "step": steps[0] if len(steps) == 1 else "",
    }
    return {
        "kind": verdict_kind(last.verdict),
        "title": title,
        "meaning": meaning,
        "facts": {name: value for name, value in facts.items() if value},
        "notes": notes(diagnosis),
    }


def _plane(looks: Sequence[Look]) -> dict[str, object]:
    placed = [
        Placed(
            look.report.conditional_entropy_est,
            look.report.mi_estimate,
            look.verdict is Verdict.HEALTHY,
            f"{'' if look.step is None else f'step {look.step}: '}{_named(look.regime)}, "
            f"MI {look.report.mi_estimate:.3f}, H(Z|X) {look.report.conditional_entropy_est:.3f}",
        )
        for look in looks
    ]
    if len(looks) == 1:
        caption = "One look has no start to be judged against: the verdict is retrieval's."
        return {"drawn": plane(placed, None), "caption": caption}
    start, limits = looks[0].report, DEFAULT_THRESHOLDS
    entropy = limits.min_entropy_of_start * start.conditional_entropy_est
    cuts = Cuts(
        entropy=max(limits.min_entropy_nats, entropy),
        mi=limits.min_mi_of_start * start.mi_estimate,
    )
    caption = (
        f"The cuts are {limits.min_mi_of_start:.0%} of the first MI and "
        f"{limits.min_entropy_of_start:.0%} of the first H(Z|X). Colour is the verdict: red "
        f"also where retrieval is less than {limits.min_dependence:.0%} of the way from chance "
        f"to 1, and until a figure is {limits.hysteresis:g} times above its cut again."
    )
    return {"drawn": plane(placed, cuts), "caption": caption}


def _curves(diagnosis: Diagnosis) -> dict[str, object] | None:
    looks = [look for look in diagnosis.looks if look.step is not None]
    if len(looks) < 2:
        return None
    chance = 1 / looks[-1].report.num_prompts
    mark = None if diagnosis.alarm is None else ("alarm", float(diagnosis.alarm.step))
    rewards = [Point(_x(look), look.rewards.mean) for look in looks if look.rewards is not None]
    series = {
        "MI per token, nats": (_points(looks, "mi_estimate"), ("", 0.0)),
        "Retrieval": (_points(looks, "retrieval_accuracy"), ("chance", chance)),
        "H(Z|X) per token, nats": (_points(looks, "conditional_entropy_est"), None),
        "Reward": (rewards, None),
    }
    return {
        "charts": {
            label: line_chart(points, label=label, x_label="step", level=level, mark=mark)
            for label, (points, level) in series.items()
            if len(points) > 1
        },
        "grid": curve_grid(diagnosis),
        "alarm": None if diagnosis.alarm is None else str(diagnosis.alarm.step),
    }


def _x(look: Look) -> float:
    assert look.step is not None
    return float(look.step)


def _points(looks: Iterable[Look], name: str) -> list[Point]:
    return [_point(_x(look), look.report, name) for look in looks]


def _point(x: float, report: CollapseReport, name: str) -> Point:
    found = report.intervals.get(name)
    value = getattr(report, name)
    return Point(x, value) if found is None else Point(x, value, found.low, found.high)


def _heat_maps(diagnosis: Diagnosis) -> dict[str, object] | None:
    shown = [(look, look.closeup) for look in diagnosis.looks if look.closeup is not None]
    if not shown:
        return None
    # One scale for both, or a collapsed look would seem as varied as a healthy one.
    peaks = np.concatenate([closeup.token.gain_if_MN.max(axis=1) for _, closeup in shown])
    limit = max(float(np.quantile(peaks, 0.95)), 1e-6)
    maps = {}
    for look, closeup in shown:
        name = "All scores" if look.step is None else f"Step {look.step}"
        label = f"{name}: scores of reasonings under prompts"
        token = closeup.token
        maps[name] = heat_map(token.gain_if_MN, token.columns_M, limit, label)
    prompts = differing_parts(shown[-1][1].prompts)
    return {"limit": limit, "shades": SHADES, "maps": maps, "prompts": prompts}


def _turns(diagnosis: Diagnosis) -> dict[str, object] | None:
    if not diagnosis.turns:
        return None
    points = [_point(look.turn, look.report, "mi_estimate") for look in diagnosis.turns]
    label = "MI per token by turn"
    drawn = line_chart(points, label=label, x_label="turn", level=("", 0.0), joined=False)
    return {"drawn": drawn, "grid": turn_grid(diagnosis)}


def _examples(closeup: Closeup) -> dict[str, object]:
    most, least = most_and_least_tied(closeup)
    return {"mean": number(float(closeup.token.gain_M.mean())), "most": most, "least": least}


def _named(regime: Regime | None) -> str:
    return regime_name(regime).replace("_", " ")


@dataclass(frozen=True, slots=True)
class Example:
    """A reasoning, and how much likelier it is under its own prompt, in nats per token."""

    column: int
    prompt: str
    reasoning: str
    gain: float


def most_and_least_tied(closeup: Closeup) -> tuple[list[Example], list[Example]]:
    """The reasonings with the highest gains and those with the lowest, extremes first.

    One that was written twice for the same prompt is shown once.
    """
    gain_M, columns_M = closeup.token.gain_M, closeup.token.columns_M
    prompts = differing_parts(closeup.prompts)
    order = np.argsort(-gain_M, kind="stable").tolist()
    examples: dict[tuple[int, str], Example] = {}
    for m in order:
        column, reasoning = int(columns_M[m]), closeup.reasonings[m]
        example = Example(column, prompts[column], reasoning, float(gain_M[m]))
        examples.setdefault((column, reasoning), example)
    distinct = list(examples.values())
    num = min(MOST_EXAMPLES, len(distinct) // 2)
    return distinct[:num], distinct[::-1][:num]
