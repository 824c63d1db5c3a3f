"""A diagnosis as one page to look at: no network, no script, light and dark.

Texts of rollouts are shown as they are, so everything is escaped, and the page forbids itself to
load or run anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from moored.analysis.diagnosis import Closeup, Diagnosis, Look
from moored.analysis.examples import Example, differing_parts, most_and_least_tied
from moored.analysis.findings import (
    METRIC_COLUMNS,
    curve_grid,
    metric_rows,
    notes,
    number,
    regime_kind,
    turn_grid,
)
from moored.analysis.style import STYLE
from moored.analysis.svg import SHADES, Cuts, Placed, Point, heat_map, line_chart, plane
from moored.diagnostics.regimes import DEFAULT_THRESHOLDS, Regime
from moored.diagnostics.report import CollapseReport
from moored.errors import ConfigError
from moored.runlog.log import write_atomically

MEANINGS = {
    Regime.DIVERSE: "Reasoning depends on its prompt and varies: this is health.",
    Regime.COMPRESSED: "Reasoning varies little and is still tied to its prompt: often fine late "
    "in training.",
    Regime.TEMPLATE_COLLAPSE: "Reasoning no longer tells which prompt it was written for, while "
    "its entropy stands, so that entropy alone shows nothing. Go back to a checkpoint before the "
    "fall; filter by reward variance, with less KL and entropy bonus.",
    Regime.LOW_ENTROPY_COLLAPSE: "Reasoning no longer tells which prompt it was written for, and "
    "hardly varies. Go back to a checkpoint before the fall; filter by reward variance.",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MOST_FILES = 6


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
    # Names of files may hold bytes that are no text, and replies a NUL.
    write_atomically(file, page.encode("utf-8", "replace").decode().replace("\0", "\ufffd"))


def render_page(diagnosis: Diagnosis, *, files: Sequence[str], model: str) -> str:
    """The page; heat map and examples need `diagnose(…, closeups=True)`."""
    last = diagnosis.looks[-1]
    sections = [
        _head(diagnosis, files, model),
        _figures(diagnosis),
        _curves(diagnosis),
        _heat_maps(diagnosis),
        _turns(diagnosis),
        "" if last.closeup is None else _examples(last.closeup),
        f"<footer>moored diagnose: {diagnosis.token_forwards:,} token-forwards in "
        f"{diagnosis.seconds:.1f} s. Specific is not correct: high MI says that reasoning depends "
        f"on its prompt, not that it is right.</footer>",
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_named(last.regime)}: moored diagnose</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _head(diagnosis: Diagnosis, files: Sequence[str], model: str) -> str:
    last = diagnosis.looks[-1]
    kind = regime_kind(last.regime)
    title, meaning = f"Regime: {_named(last.regime)}", MEANINGS[last.regime]
    if diagnosis.alarm is not None:
        title += f", alarm at step {diagnosis.alarm.step}"
        meaning += (
            " The alarm: MI fell well below the highest level the run held, for longer than its "
            "noise explains."
        )
    steps = [str(look.step) for look in diagnosis.looks if look.step is not None]
    facts = {
        "prompts, N": str(last.report.num_prompts),
        "reasonings, M": f"{last.report.num_reasonings} of {last.reasoning_tokens_mean:.0f} tokens",
        "model": model,
        "files": ", ".join(files[:MOST_FILES])
        + (f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""),
        "steps": f"{steps[0]} to {steps[-1]}, {len(steps)} looks" if len(steps) > 1 else "",
        "step": steps[0] if len(steps) == 1 else "",
    }
    listed = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v)
    lines = "".join(
        f'<li class="{found.kind}">{escape(found.text)}</li>' for found in notes(diagnosis)
    )
    return (
        f'<header class="{kind}"><h1 class="{kind}">{title}</h1><p>{meaning}</p>'
        f"<dl>{listed}</dl><ul>{lines}</ul></header>"
    )


def _figures(diagnosis: Diagnosis) -> str:
    last = diagnosis.looks[-1]
    where = f" of step {last.step}" if len(diagnosis.looks) > 1 and last.step is not None else ""
    table = _table(METRIC_COLUMNS, metric_rows(last.report))
    return (
        f'<section><div class="pair"><div><h2>Every metric{where}</h2>{table}'
        '<p class="soft">p: the chance of such a value if reasonings were dealt to prompts at '
        f"random.</p></div>{_plane(diagnosis.looks)}</div></section>"
    )


def _plane(looks: Sequence[Look]) -> str:
    placed = [
        Placed(
            look.report.conditional_entropy_est,
            look.report.mi_estimate,
            look.regime.is_grounded,
            f"{'' if look.step is None else f'step {look.step}: '}{_named(look.regime)}, "
            f"MI {look.report.mi_estimate:.3f}, H(Z|X) {look.report.conditional_entropy_est:.3f}",
        )
        for look in looks
    ]
    cuts, caption = None, "One look has no start to be judged against: the verdict is retrieval's."
    if len(looks) > 1:
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
    return (
        f"<figure><h2>Diversity and input dependence</h2>{plane(placed, cuts)}"
        f"<figcaption>MI per token over H(Z|X). {caption}</figcaption></figure>"
    )


def _curves(diagnosis: Diagnosis) -> str:
    looks = [look for look in diagnosis.looks if look.step is not None]
    if len(looks) < 2:
        return ""
    chance = 1 / looks[-1].report.num_prompts
    mark = None if diagnosis.alarm is None else ("alarm", float(diagnosis.alarm.step))
    charts = {
        "MI per token, nats": (_points(looks, "mi_estimate"), ("", 0.0)),
        "Retrieval": (_points(looks, "retrieval_accuracy"), ("chance", chance)),
        "H(Z|X) per token, nats": (_points(looks, "conditional_entropy_est"), None),
        "Reward": (
            [Point(_x(look), look.rewards.mean) for look in looks if look.rewards is not None],
            None,
        ),
    }
    figures = "".join(
        f"<figure><h3>{label}</h3>"
        f"{line_chart(points, label=label, x_label='step', level=level, mark=mark)}</figure>"
        for label, (points, level) in charts.items()
        if len(points) > 1
    )
    grid = curve_grid(diagnosis)
    alarm = None if diagnosis.alarm is None else str(diagnosis.alarm.step)
    table = _table(grid.header, grid.rows, alarm=alarm)
    return (
        f'<section><h2>Over the steps</h2><div class="pair">{figures}</div>'
        f'<p class="soft">Bands are 95 % intervals.</p>'
        f"<details><summary>All steps in figures</summary>{table}</details></section>"
    )


def _x(look: Look) -> float:
    assert look.step is not None
    return float(look.step)


def _points(looks: Iterable[Look], name: str) -> list[Point]:
    return [_point(_x(look), look.report, name) for look in looks]


def _point(x: float, report: CollapseReport, name: str) -> Point:
    found = report.intervals.get(name)
    value = getattr(report, name)
    return Point(x, value) if found is None else Point(x, value, found.low, found.high)


def _heat_maps(diagnosis: Diagnosis) -> str:
    shown = [(look, look.closeup) for look in diagnosis.looks if look.closeup is not None]
    if not shown:
        return ""
    # One scale for both, or a collapsed look would seem as lively as a healthy one.
    peaks = np.concatenate([closeup.token.gain_if_MN.max(axis=1) for _, closeup in shown])
    limit = max(float(np.quantile(peaks, 0.95)), 1e-6)
    maps = []
    for look, closeup in shown:
        name = "All scores" if look.step is None else f"Step {look.step}"
        drawn = heat_map(
            closeup.token.gain_if_MN,
            closeup.token.columns_M,
            limit,
            f"{name}: scores of reasonings under prompts",
        )
        maps.append(f"<figure><h3>{name}</h3>{drawn}</figure>")
    swatches = "".join(
        f'<rect class="h{k}" x="{20 * k}" width="20" height="12"/>' for k in range(SHADES)
    )
    return (
        "<section><h2>Every reasoning under every prompt</h2>"
        "<p>A row is a reasoning, a column a prompt; frames mark the prompt it was written for. "
        "Reasoning that depends on its input is likeliest inside the frames: a diagonal shows.</p>"
        f'<p class="legend soft">−{limit:.2f} or less <svg viewBox="0 0 {20 * SHADES} 12" '
        f'aria-hidden="true">{swatches}</svg> +{limit:.2f} or more: log-probability a token, '
        "against the mixture of all prompts, nats</p>"
        f'<div class="pair">{"".join(maps)}</div>{_prompts(shown[-1][1])}</section>'
    )


def _prompts(closeup: Closeup) -> str:
    texts = differing_parts(closeup.prompts)
    listed = "".join(f"<h3>{k}</h3><pre>{escape(t)}</pre>" for k, t in enumerate(texts, start=1))
    return (
        f"<details><summary>The {len(texts)} prompts of the last look, from where they differ"
        f"</summary>{listed}</details>"
    )


def _turns(diagnosis: Diagnosis) -> str:
    if not diagnosis.turns:
        return ""
    label = "MI per token by turn"
    points = [_point(look.turn, look.report, "mi_estimate") for look in diagnosis.turns]
    drawn = line_chart(points, label=label, x_label="turn", level=("", 0.0), joined=False)
    grid = turn_grid(diagnosis)
    return (
        f'<section><h2>By turn of the episode</h2><div class="row"><figure>{drawn}<figcaption>MI '
        "per token, nats, with 95 % intervals, in the last step.</figcaption></figure><div>"
        f'{_table(grid.header, grid.rows)}<p class="soft">The prompt of a later turn is the whole '
        "dialogue before it. Such prompts differ more, and hardly two are alike, so M is small "
        "and intervals are wide: compare with the same turn of an earlier step.</p></div></div>"
        "</section>"
    )


def _examples(closeup: Closeup) -> str:
    most, least = map(_articles, most_and_least_tied(closeup))
    mean = number(float(closeup.token.gain_M.mean()))
    return (
        "<section><h2>Most and least tied to their prompt</h2>"
        "<p>How much likelier a reasoning is under its own prompt than under the mixture of all; "
        f"the mean over all reasonings, {mean}, is the MI.</p>"
        f'<div class="pair"><div><h3>Most</h3>{most}</div><div><h3>Least</h3>{least}</div></div>'
        "</section>"
    )


def _articles(examples: Iterable[Example]) -> str:
    return "".join(
        f"<article><b>{example.gain:+.3f}</b> nats a token, prompt {example.column + 1}"
        f"<pre>{escape(example.prompt)}</pre>Reasoning<pre>{escape(example.reasoning)}</pre>"
        "</article>"
        for example in examples
    )


def _named(regime: Regime) -> str:
    return regime.replace("_", " ")


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, alarm: str | None = None
) -> str:
    above = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        kind = ' class="alarm"' if row[0] == alarm else ""
        body += f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{above}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )
