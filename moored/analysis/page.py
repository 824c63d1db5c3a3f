"""A diagnosis as one HTML page: no network, no script, light and dark.

This module gathers what is shown; `page.html` is the template, `page.css` the style. Texts of
rollouts are shown as they are, so the template escapes everything, and the page forbids itself to
load or run anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np

from moored import __version__
from moored.analysis.diagnosis import Closeup, Diagnosis, Look, Series
from moored.analysis.excerpts import differing_parts
from moored.analysis.findings import (
    KINDS,
    METRIC_COLUMNS,
    Grid,
    curve_grid,
    explanation,
    headline,
    interval_of,
    metric_rows,
    named,
    notes,
    number,
    turn_grid,
)
from moored.analysis.svg import SHADES, Cuts, Placed, Point, heat_map, line_chart, plane
from moored.diagnostics.chain import LINKS, Link
from moored.diagnostics.report import CollapseReport
from moored.diagnostics.verdict import DEFAULT_THRESHOLDS
from moored.errors import ConfigError
from moored.runlog.log import is_special, write_atomically

MOST_FILES = 6
MOST_EXAMPLES = 3
"""Reasonings on either side."""


def check_can_write(file: Path) -> None:
    """Raise before anything is measured when the page could not be written."""
    if file.is_dir():
        raise ConfigError(f"--html needs a file, got the folder {str(file)!r}")
    if not file.parent.is_dir():
        raise ConfigError(f"--html: the folder {str(file.parent)!r} does not exist; make it first")
    if not is_special(file) and not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--html: the folder {str(file.parent)!r} cannot be written to")


def write_page(file: Path, diagnosis: Diagnosis, *, files: Sequence[str], command: str) -> None:
    """Write the page, whole or not at all."""
    made = datetime.now().astimezone()
    page = render_page(diagnosis, files=files, command=command, made=made)
    # Names of files may hold bytes that are not text, and replies a NUL.
    write_atomically(file, page.encode("utf-8", "replace").decode().replace("\0", "\ufffd"))


def render_page(diagnosis: Diagnosis, *, files: Sequence[str], command: str, made: datetime) -> str:
    """The page; heat map and examples need `diagnose(…, closeups=True)`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    closeups = diagnosis.closeups
    return environment.from_string(_read("page.html")).render(
        style=Markup(_read("page.css")),
        diagnosis=diagnosis,
        head=_head(diagnosis, files),
        environments=[_environment(series, diagnosis) for series in diagnosis.series],
        heat=_heat_maps(closeups) if closeups else None,
        examples=_examples(closeups[-1]) if closeups else None,
        footer={
            "command": command,
            "date": made.strftime("%Y-%m-%d %H:%M %Z").strip(),
            "version": __version__,
        },
    )


def _read(name: str) -> str:
    return (package_files("moored.analysis") / name).read_text(encoding="utf-8")


def _head(diagnosis: Diagnosis, files: Sequence[str]) -> dict[str, object]:
    found = headline(diagnosis)
    looks = [look for series in diagnosis.series for look in series.looks]
    steps = sorted({step for look in looks for step in look.steps})
    num_looks = "1 look" if len(looks) == 1 else f"{len(looks)} looks"
    more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
    facts = {
        "files": ", ".join(files[:MOST_FILES]) + more,
        "steps": f"{steps[0]} to {steps[-1]}, {num_looks}" if len(steps) > 1 else "",
        "step": str(steps[0]) if len(steps) == 1 else "",
    }
    return {
        "kind": found.kind,
        "title": found.text,
        "meaning": explanation(diagnosis),
        "facts": {name: value for name, value in facts.items() if value},
        "notes": notes(diagnosis),
    }


def _environment(series: Series, diagnosis: Diagnosis) -> dict[str, object]:
    """Everything about one environment."""
    last = series.looks[-1]
    where = f" of step {last.label}" if len(series.looks) > 1 and last.step is not None else ""
    return {
        "name": "" if diagnosis.is_of_one else series.name,
        "curves": _curves(series),
        "metrics": {"where": where, "grid": Grid(METRIC_COLUMNS, tuple(metric_rows(last.report)))},
        "plane": _plane(series.looks),
        "turns": _turns(series),
    }


def _plane(looks: Sequence[Look]) -> dict[str, object]:
    placed = [
        Placed(
            look.report.conditional_entropy_est,
            look.report.mi_estimate,
            KINDS[look.verdict],
            f"{'' if look.step is None else f'step {look.label}: '}{named(look.verdict)}, "
            f"MI {look.report.mi_estimate:.3f}, H(Z|X) {look.report.conditional_entropy_est:.3f}",
        )
        for look in looks
    ]
    if len(looks) == 1:
        caption = "One look has no start to be judged against."
        return {"drawn": plane(placed, None), "caption": caption}
    cuts, caption = regime_cuts(looks[0].report), plane_caption()
    return {"drawn": plane(placed, cuts), "caption": caption}


def regime_cuts(start: CollapseReport) -> Cuts:
    """Where the regimes of a run meet, from its first look."""
    limits = DEFAULT_THRESHOLDS
    entropy = limits.min_entropy_of_start * start.conditional_entropy_est
    return Cuts(
        entropy=max(limits.min_entropy_nats, entropy),
        mi=limits.min_mi_of_start * start.mi_estimate,
    )


def plane_caption() -> str:
    limits = DEFAULT_THRESHOLDS
    return (
        f"The cuts are {limits.min_mi_of_start:.0%} of the first MI and "
        f"{limits.min_entropy_of_start:.0%} of the first H(Z|X). Colour is the verdict, which also "
        f"looks at intervals: green is healthy, red collapsed, amber cannot be told."
    )


def _curves(series: Series) -> dict[str, object] | None:
    looks = [look for look in series.looks if look.step is not None]
    if len(looks) < 2:
        return None
    chance = 1 / looks[-1].report.num_prompts
    mark = None if series.alarm is None else ("alarm", float(series.alarm.step))
    rewards = [Point(_x(look), look.rewards.mean) for look in looks if look.rewards is not None]
    charts = {
        "MI per token, nats": (_points(looks, "mi_estimate"), ("", 0.0)),
        "Retrieval": (_points(looks, "retrieval_accuracy"), ("chance", chance)),
        "H(Z|X) per token, nats": (_points(looks, "conditional_entropy_est"), None),
        "Reward": (rewards, None),
        "Correlation of dependence and reward": (_worth_points(series), ("", 0.0)),
        **{
            f"{LINKS[name]}, nats beyond chance": (_chain_points(found), ("", 0.0))
            for name, found in series.links.items()
        },
    }
    alarmed = next((k.label for k in looks if mark and k.step == mark[1]), None)
    return {
        "charts": {
            label: line_chart(points, label=label, x_label="step", level=level, mark=mark)
            for label, (points, level) in charts.items()
            if len(points) > 1
        },
        "grid": curve_grid(series),
        "alarm": alarmed,
    }


def _x(look: Look) -> float:
    assert look.step is not None
    return float(look.step)


def _worth_points(series: Series) -> list[Point]:
    known = [(look, worth) for look, worth in series.worths if look.step is not None]
    return [
        Point(_x(look), worth.correlation, worth.interval.low, worth.interval.high)
        for look, worth in known
    ]


def _chain_points(found: Sequence[tuple[int, Link]]) -> list[Point]:
    return [
        Point(step, link.mi_nats)
        if link.interval is None
        else Point(step, link.mi_nats, link.interval.low, link.interval.high)
        for step, link in found
    ]


def _points(looks: Iterable[Look], name: str) -> list[Point]:
    return [_point(_x(look), look.report, name) for look in looks]


def _point(x: float, report: CollapseReport, name: str) -> Point:
    found = interval_of(report, name)
    value = getattr(report, name)
    return Point(x, value) if found is None else Point(x, value, found.low, found.high)


def _heat_maps(closeups: Sequence[Closeup]) -> dict[str, object]:
    # One scale for both, or a collapsed look would seem as varied as a healthy one.
    peaks = np.concatenate([closeup.token.gain_if_MN.max(axis=1) for closeup in closeups])
    limit = max(float(np.quantile(peaks, 0.95)), 1e-6)
    maps = {}
    for closeup in closeups:
        label = f"{closeup.name}: scores of reasonings under prompts"
        token = closeup.token
        maps[closeup.name] = heat_map(token.gain_if_MN, token.columns_M, limit, label)
    prompts = differing_parts(closeups[-1].prompts)
    return {"limit": limit, "shades": SHADES, "maps": maps, "prompts": prompts}


def _turns(series: Series) -> dict[str, object] | None:
    if not series.turns:
        return None
    points = [_point(look.turn, look.report, "mi_estimate") for look in series.turns]
    label = "MI per token by turn"
    drawn = line_chart(points, label=label, x_label="turn", level=("", 0.0), joined=False)
    return {"drawn": drawn, "grid": turn_grid(series)}


def _examples(closeup: Closeup) -> dict[str, object]:
    most, least = most_and_least_tied(closeup)
    return {"mean": number(float(closeup.token.gain_M.mean())), "most": most, "least": least}


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
