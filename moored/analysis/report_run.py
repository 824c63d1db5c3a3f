"""The report on one run: verdict, curves, plane, rewards, gradients, trajectories, options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import join
from statistics import fmean
from typing import Any

import numpy as np

from moored.algo.snr import FREE_ABOVE
from moored.analysis.compare import lost_sentence, option_cell
from moored.analysis.figures import (
    Bars,
    Curve,
    about_cuts,
    bar_chart,
    line_chart,
    phase_chart,
    variance_histogram,
)
from moored.analysis.findings import (
    Finding,
    Kind,
    explanation,
    headline,
    notes,
    number,
    push_findings,
)
from moored.analysis.heat_maps import reward_map, score_map, shade_limit
from moored.analysis.report import Drawn, Report, Section
from moored.analysis.report_data import (
    FIGURES,
    OUTCOME_FREE,
    OUTCOME_FREE_CAPTION,
    Points,
    RunData,
    phase_seconds,
    read_run,
    smoothed,
    step_curves,
    thinned,
)
from moored.analysis.report_diagnosis import (
    SCORES_TEXT,
    SCORES_TITLE,
    about_alarm,
    all_looks,
    look_figures,
    plane,
)
from moored.analysis.report_rollouts import MOST_PROMPTS, StepGroups
from moored.analysis.stored import early_share
from moored.analysis.trend import no_progress
from moored.diagnostics.information import Likelihood
from moored.names import DIVIDES_BY_STD

WINDOWS = 30
"""The running mean of a curve takes in one of this many parts of it."""
RARE = ("validation", "held-out")
"""How the names of curves begin that are measured now and then only."""
TERMS = ("task", "kl", "entropy")
"""Of a loss, in the order in which they are drawn."""
TURN_REWARDS = ("rollout/valid_turn_reward_mean", "rollout/malformed_turn_reward_mean")


def report_of_run(path: Path) -> Report:
    """Everything about one run."""
    run = read_run(path)
    found = _headline(run)
    meaning = explanation(run.diagnosis) if run.diagnosis is not None else []
    return Report(
        kind=found.kind,
        title=found.text,
        meaning=tuple(line.text for line in meaning),
        facts=_facts(run),
        notes=tuple(_notes(run)),
        sections=(
            _dynamics(run),
            plane(run.series),
            _scores(run),
            _rewards(run),
            _gradients(run),
            _trajectories(run),
            all_looks(run.series),
            Section(title="Configuration", block=run.config_text, is_folded=True),
            Section(title="Command and versions", block=_starts(run), is_folded=True),
        ),
    )


def _headline(run: RunData) -> Finding:
    if run.options.get("command") == "sft":
        return Finding("Warm start, which has no verdict")
    if run.diagnosis is None:
        return Finding("No verdict: input dependence was not measured")
    found, alarm = headline(run.diagnosis), run.alarm_step
    if alarm is None or "alarm" in found.text:
        return found
    return Finding(f"{found.text}, alarm at step {alarm}", found.kind)


def _facts(run: RunData) -> dict[str, str]:
    options = run.options
    planned = "" if run.num_steps is None else f" of {run.num_steps}"
    envs = options.get("env")
    names = [str(e.get("name")) for e in envs if isinstance(e, Mapping)] if envs else []
    facts = {
        "run": str(run.path),
        "steps": f"{run.last_step}{planned}",
        "environment": ", ".join(names),
        "model": str(options.get("model", "")),
        "algorithm": _option(options, "algorithm", "name"),
        "filter": _filter(options),
        "seed": str(options.get("seed", "")),
    }
    return {name: value for name, value in facts.items() if value}


def _filter(options: Mapping[str, Any]) -> str:
    """The rule and its number, and what makes it keep others than the groups that vary most."""
    chosen = options.get("filter")
    rule = _option(options, "filter", "rule")
    if not isinstance(chosen, Mapping):
        return rule
    parts = [rule if rule in ("none", "nonzero") else f"{rule} {chosen.get('value', '')}".strip()]
    if rule != "none" and chosen.get("largest") is False:
        parts.append("lowest first")
    if num := chosen.get("best_and_worst"):
        parts.append(f"{num} best and {num} worst trajectories of a group")
    return ", ".join(part for part in parts if part)


def _option(options: Mapping[str, Any], section: str, key: str) -> str:
    chosen = options.get(section)
    value = chosen.get(key) if isinstance(chosen, Mapping) else None
    return "" if value is None else str(value)


def _notes(run: RunData) -> Iterable[Finding]:
    if run.num_steps is not None and run.last_step < run.num_steps:
        text = f"The run is not complete: {run.last_step} of {run.num_steps} steps are finished."
        yield Finding(text, Kind.WARNING)
    for change in run.changes:
        text = (
            f"{change.name} was changed from {option_cell(change.old)} to "
            f"{option_cell(change.new)} when the run was resumed after step {change.step}."
        )
        yield Finding(text, Kind.WARNING)
    for problem in run.problems:
        yield Finding(f"Left out: {problem}", Kind.WARNING)
    if lost := lost_sentence(run.steps):
        yield Finding(lost, Kind.WARNING)
    if stalled := no_progress(run.steps, run.num_steps or run.last_step):
        yield Finding(f"{stalled[:1].upper()}{stalled[1:]}.", Kind.WARNING)
    yield from _turn_price(run.steps)
    if run.diagnosis is not None:
        yield from notes(run.diagnosis)
    else:
        chosen = _option(run.options, "algorithm", "advantage")
        divides = (chosen or _option(run.options, "algorithm", "name")) in DIVIDES_BY_STD
        yield from push_findings(early_share(run.steps), divides=divides)


def _turn_price(steps: Sequence[Mapping[str, Any]]) -> Iterable[Finding]:
    """Whether a malformed reply is the cheaper one, over the steps that hold both kinds."""
    pairs = [[record.get(key) for key in TURN_REWARDS] for record in steps]
    both = [pair for pair in pairs if None not in pair]
    if not both:
        return
    valid, malformed = (fmean(values) for values in zip(*both, strict=True))
    if malformed > valid:
        text = (
            f"A malformed reply costs less than a well-formed one: {number(malformed)} against "
            f"{number(valid)} a turn. A policy learns what is cheaper: make the penalty for "
            f"malformed replies larger than the price of the moves that they save."
        )
        yield Finding(text, Kind.WARNING)


def _dynamics(run: RunData) -> Section:
    """How the run went: loss, success, reward, input dependence, form, filter, time."""
    curves, alarm = step_curves(run.steps), run.alarm_step
    window = max(len(run.steps) // WINDOWS, 1)
    draw = partial(_step_figure, curves, alarm)
    figures = [
        *draw("loss", "Loss", "training loss", "held-out loss"),
        *draw("success", "Success", "success", "validation success"),
        *draw("reward", "Reward", "reward"),
        *look_figures(run.series, alarm),
        *draw("length", "Length of replies", "reply tokens"),
        *draw("validity", "Well-formed replies", "well-formed replies"),
        *draw("turns", "Reward of a turn", "well-formed turns", "malformed turns"),
        *draw("filter", "Filter", "kept groups", "groups without variance"),
        *draw("variance", "Reward variance in a group", "reward variance"),
        *draw("outcome_free", "Outcome-free share", OUTCOME_FREE),
        *_time_figure(run, alarm),
    ]
    means = "" if window < 2 else f" Faint lines are single steps, strong ones means over {window}."
    cut = about_cuts(drawn.chart for drawn in figures)
    bands = "" if run.diagnosis is None else "Bands are 95 % intervals over prompts."
    text = f"{bands}{cut}{means}{about_alarm(alarm)}".lstrip()
    return Section(title="Over the steps", text=text, figures=tuple(figures))


def _step_figure(
    curves: Mapping[str, Points], alarm: int | None, slug: str, title: str, *names: str
) -> Iterator[Drawn]:
    """One figure, if any of its curves is known."""
    known = [name for name in names if name in curves]
    if not known:
        return
    lines = [
        line
        for style, name in enumerate(known)
        for line in _lines(name, curves[name], style, is_rare=name.startswith(RARE))
    ]
    chart = line_chart(
        lines,
        y_title=FIGURES[known[0]][1],
        alarm_step=alarm,
        level=("", FREE_ABOVE) if OUTCOME_FREE in known else None,
    )
    caption = OUTCOME_FREE_CAPTION if OUTCOME_FREE in known else ""
    yield Drawn(slug=slug, title=title, chart=chart, caption=caption)


def _lines(name: str, points: Points, style: int, *, is_rare: bool) -> list[Curve]:
    """Every step faintly and the running mean on top; now and then measured ones as they are."""
    steps, values = points
    if is_rare:
        return [Curve(name=name, x=steps, y=values, style=style, has_dots=True)]
    window = max(len(steps) // WINDOWS, 1)
    x, y = thinned(steps, values)
    if window < 2:
        return [Curve(name=name, x=x, y=y, style=style)]
    mean_x, mean_y = thinned(steps, smoothed(values, window))
    return [
        Curve(name=name, x=x, y=y, style=style, is_faint=True),
        Curve(name=name, x=mean_x, y=mean_y, style=style),
    ]


def _time_figure(run: RunData, alarm: int | None) -> Iterator[Drawn]:
    seconds = phase_seconds(run.timing)
    if not seconds:
        return
    steps = [record["step"] for record in run.timing]
    thin = {phase: thinned(steps, values)[1] for phase, values in seconds.items()}
    chart = phase_chart(thinned(steps, steps)[0], thin, alarm)
    yield Drawn(slug="time", title="Time of a step by phase", chart=chart)


def _scores(run: RunData) -> Section:
    """The first stored look and the last, side by side for each view."""
    first, last = min(run.scores, default=0), max(run.scores, default=0)
    stages = {"early": first, "late": last} if first < last else {"only look": last}
    found = {
        (step, view): Likelihood.of(matrix.logp_MN, matrix.columns_M).gain_if_MN
        for step, views in run.scores.items()
        for view, matrix in views.items()
    }
    limit = shade_limit(list(found.values()))
    figures = [
        Drawn(
            slug=f"scores_{view}_{stage}".replace("/", "_").replace(" ", "_"),
            title=f"{stage.capitalize()}: step {step}, {view.replace('_', ' ')}",
            chart=score_map(found[step, view], matrix.columns_M, limit, matrix.blocks_M),
        )
        for view in dict.fromkeys(view for _, view in found)
        for stage, step in stages.items()
        if (matrix := run.scores.get(step, {}).get(view)) is not None
    ]
    text = (
        f"{SCORES_TEXT} In observation swap the columns are observations of the same turn, put in "
        f"after the reasoning's own history."
    )
    return Section(title=SCORES_TITLE, text=text, figures=tuple(figures))


def _rewards(run: RunData) -> Section:
    """Rewards and RV of every prompt early, in the middle and late; all RVs together."""
    title = "Rewards of each prompt, and their variance (RV)"
    rollouts = run.rollouts
    if rollouts is None or not rollouts.stages:
        return Section(title=title)
    stages = {name: _largest(stage) for name, stage in rollouts.stages.items()}
    rewards = np.concatenate([stage.rewards_PG.ravel() for stage in stages.values()])
    finite = rewards[np.isfinite(rewards)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    variance_max = max(float(stage.variance_P.max(initial=0.0)) for stage in stages.values())
    figures = [
        Drawn(
            slug=f"rewards_{name}",
            title=f"{name.capitalize()}: step {stage.step}",
            chart=reward_map(
                stage.rewards_PG,
                stage.variance_P,
                labels=stage.labels,
                is_kept=stage.is_kept_P.tolist(),
                reward_range=(low, high),
                variance_max=variance_max or 1.0,
            ),
        )
        for name, stage in stages.items()
    ]
    num = rollouts.num_files
    histogram = Drawn(
        slug="rv",
        title=f"RV of all groups of {num} stored step{'s' if num > 1 else ''}",
        chart=variance_histogram(rollouts.kept_variance, rollouts.dropped_variance),
    )
    return Section(
        title=title,
        text="A row is a prompt, largest RV on top, and its cells are the rewards of its "
        "trajectories in descending order. Where all have the same reward, RV is 0 and the "
        f"prompt teaches nothing. {_what_varies(run.options)}",
        figures=(*figures, histogram),
        columns=3,
    )


def _what_varies(options: Mapping[str, Any]) -> str:
    """Which rewards RV is of: those that the filter goes by."""
    chosen = _option(options, "filter", "reward")
    if chosen == "total":
        return "RV is of all that was earned, penalties included, as filter.reward=total has it."
    if chosen == "success":
        return "RV is of the outcome, 1 or 0, as filter.reward=success has it."
    return (
        "RV is of what the filter goes by: task rewards, without penalties for form, where a "
        "malformed failure counts at most as much as the worst well-formed trajectory."
    )


def _largest(stage: StepGroups) -> StepGroups:
    """A heat map of at most `MOST_PROMPTS`, spread evenly over the ranks of RV."""
    if len(stage.labels) <= MOST_PROMPTS:
        return stage
    order = np.argsort(-stage.variance_P, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, MOST_PROMPTS).round().astype(int)]
    return StepGroups(
        step=stage.step,
        labels=tuple(stage.labels[p] for p in chosen),
        rewards_PG=stage.rewards_PG[chosen],
        variance_P=stage.variance_P[chosen],
        is_kept_P=stage.is_kept_P[chosen],
    )


def _gradients(run: RunData) -> Section:
    """The first and the last measurement: norm and SNR of each term by RV."""
    measured = run.gradients
    chosen = [measured[0], measured[-1]] if len(measured) > 1 else list(measured)
    figures = [
        _gradient_figure(record, key, title, f"gradient_{key}_{place}")
        for key, title in (("norm", "Norm of the mean gradient"), ("snr", "Signal to noise"))
        for place, record in zip(("first", "last"), chosen, strict=False)
    ]
    return Section(
        title="Gradients by reward variance",
        text="Each group of bars is a bucket of prompts with similar RV: the gradient of the task "
        "term and of the regularisers, with intervals over groups. The mean of noise alone has a "
        "signal-to-noise ratio of about 1.",
        figures=tuple(drawn for drawn in figures if drawn is not None),
    )


def _gradient_figure(record: Mapping[str, Any], key: str, title: str, slug: str) -> Drawn | None:
    buckets: Sequence[Mapping[str, Any]] = record["buckets"]
    categories = [
        f"{place}: {bucket.get('rv_low', 0):.3g}…{bucket.get('rv_high', 0):.3g}"
        for place, bucket in enumerate(buckets, start=1)
    ]
    bars = []
    for term in TERMS:
        entries = [bucket.get("terms", {}).get(term, {}) for bucket in buckets]
        values = [entry.get(key) for entry in entries]
        if all(value is None for value in values):
            continue
        intervals = [entry.get(f"{key}_interval") or (None, None) for entry in entries]
        low, high = [pair[0] for pair in intervals], [pair[1] for pair in intervals]
        bars.append(Bars(name=term, values=values, low=low, high=high))
    if not bars:
        return None
    step = f", step {record['step']}" if record.get("step") is not None else ""
    chart = bar_chart(categories, bars, x_title="bucket: range of RV", y_title=title.lower())
    return Drawn(slug=slug, title=f"{title}{step}", chart=chart)


def _trajectories(run: RunData) -> Section:
    found = run.rollouts.trajectories if run.rollouts is not None else ()
    return Section(
        title="Trajectories",
        text="What the model saw and wrote. Long texts are cut, and prompts begin where those of "
        "the step differ.",
        articles=found,
    )


def _starts(run: RunData) -> str:
    """By which command the run was started and resumed, with which versions and where."""
    blocks = []
    for record in run.starts:
        step, machine = record["step"], record.get("machine", {})
        lines = [
            "started" if step == 0 else f"resumed after step {step}",
            join(map(str, record.get("command", []))),
            ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items()),
            str(record.get("engine", "")),
            ", ".join(f"{name} {value}" for name, value in machine.items()),
        ]
        blocks.append("\n".join(line for line in lines if line))
    return "\n\n".join(blocks)
