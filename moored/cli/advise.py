"""`moored advise`: would a filter help, which one, and what else is wrong with these rewards?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import counted, make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import (
    AsJson,
    ColumnNames,
    GroupColumn,
    Reader,
    RewardColumns,
    Rollouts,
    SkipBad,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moored.analysis.advice import BatchAdvice, Histogram
    from moored.analysis.rewards import RewardGroups

BAR_WIDTH = 40
"""Longest bar of the histogram, where the terminal has room for it."""


def advise_command(
    files: Rollouts,
    columns: ColumnNames = None,
    reward: RewardColumns = None,
    group: GroupColumn = None,
    reader: Reader = None,
    skip_bad: SkipBad = False,
    step: Annotated[int | None, typer.Option(help="Look at one step only.")] = None,
    success_reward: Annotated[
        float | None, typer.Option(help="Reward from which a trajectory counts as a success.")
    ] = None,
    update_share: Annotated[
        float | None,
        typer.Option(help="Share of the step time spent in the update.", min=0.0, max=1.0),
    ] = None,
    examples: Annotated[int, typer.Option(help="Prompts shown for each cause.", min=0)] = 2,
    as_json: AsJson = False,
) -> None:
    """Say from the rewards of rollouts whether filtering pays."""
    from moored.analysis.advice import advise_batch
    from moored.analysis.models import find_run, read_run_config
    from moored.analysis.rewards import read_rewards
    from moored.files.records import ReadOptions, parse_columns, parse_weights

    options = ReadOptions(
        reader=reader,
        rewards=parse_weights(reward or ()),
        columns=parse_columns(columns or (), group=group),
    )
    with make_console(stderr=True).status("reading") as status:
        batch = read_rewards(
            files,
            options,
            skip_bad=skip_bad,
            on_rows=lambda count: status.update(f"reading: {count:,} trajectories"),
        )
    if step is not None:
        batch = batch.at_step(step)
    own = find_run(files)
    advice = advise_batch(
        batch.rewards,
        batch.group_of,
        steps=batch.steps,
        earned=batch.earned,
        success=batch.success,
        divides=own is None or read_run_config(own).algorithm.divides_by_std,
        behaviours=None if batch.behaviours is None else batch.behaviours.tolist(),
        success_reward=success_reward,
        update_share=update_share,
    )
    if as_json:
        print_json(_as_dict(advice, batch, examples))
    else:
        _show(make_console(), advice, batch, examples)


def _example_prompts(advice: BatchAdvice, batch: RewardGroups, num: int) -> dict[str, list[str]]:
    """For each cause a few prompts of its groups, one line each."""
    from moored.algo.causes import CAUSES

    found = {}
    for cause in CAUSES:
        texts = (" ".join(batch.prompts[i].split()) for i in getattr(advice.plain.triage, cause))
        found[cause] = list(dict.fromkeys(text for text in texts if text not in ("", "…")))[:num]
    return found


def _as_dict(advice: BatchAdvice, batch: RewardGroups, examples: int) -> dict[str, object]:
    from moored.algo.causes import CAUSES

    prompts = _example_prompts(advice, batch, examples)
    settings, trend, free = advice.settings, advice.trend, advice.plain.outcome_free
    return {
        "num_groups": advice.num_groups,
        "num_steps": advice.num_steps,
        "num_trajectories": len(batch.rewards),
        "group_sizes": list(advice.group_sizes),
        "rv_mean": advice.plain.rv.mean,
        "rv_std": advice.plain.rv.std,
        "std_over_mean": advice.plain.rv.std_over_mean,
        "std_over_mean_interval": list(advice.plain.std_over_mean_interval),
        "outcome_free": None if free is None else {**asdict(free), "share": free.share},
        "groups_needed": advice.plain.groups_needed,
        "histogram": {
            "num_zero": advice.histogram.num_zero,
            "edges": advice.histogram.edges.tolist(),
            "counts": advice.histogram.counts.tolist(),
        },
        "effects": [asdict(effect) for effect in advice.effects],
        "causes": {
            cause: {
                "num_groups": len(getattr(advice.plain.triage, cause)),
                "share": advice.plain.triage.share(cause),
                "prompts": prompts[cause],
            }
            for cause in CAUSES
        },
        "recommendation": advice.plain.recommendation.value,
        "headline": advice.headline,
        "settings": None if settings is None else asdict(settings),
        "reasons": list(advice.reasons),
        "trend": None if trend is None else {**asdict(trend), "direction": trend.direction},
        "notes": list(batch.notes),
    }


def _show(console: Console, advice: BatchAdvice, batch: RewardGroups, examples: int) -> None:
    from rich.padding import Padding

    console.print(advice.headline, style="bold")
    smallest, largest = advice.group_sizes
    size = f"{largest}" if smallest == largest else f"{smallest} to {largest}"
    groups = f"{advice.num_groups:,} groups of {size}, {counted(advice.num_steps, 'step')}"
    console.print(f"{len(batch.rewards):,} trajectories, {groups}")
    for note in batch.notes:
        print_line(console, f"note: {note}", style="yellow")
    console.print("\nReward variance of a group", style="bold")
    for line in _bars(advice.histogram, console.width):
        console.print(line)
    low, high = advice.plain.std_over_mean_interval
    console.print(
        f"Std/Mean {advice.plain.rv.std_over_mean:.2f} (95% interval {low:.2f} to {high:.2f}). "
        f"RAGEN-2: filtering helped at 1.16 and 1.29, and cost points at 0.33."
    )
    free = advice.plain.outcome_free
    if free is None:
        known = "unknown: it needs a column of successes, or --success-reward."
    else:
        (low, high), divided = free.interval, "divided" if free.divides else "not divided"
        known = (
            f"{free.divided:.2f} with division by the group's std, {free.plain:.2f} without "
            f"(95% interval {low:.2f} to {high:.2f}, {divided} by the group's std)."
        )
    console.print(f"Outcome-free share {known}")
    console.print(_effects_table(advice))
    console.print("Groups that vary little", style="bold")
    _show_causes(console, advice, batch, examples)
    if advice.trend is not None:
        console.print("\nOver the steps", style="bold")
        console.print(f"  {advice.trend}")
    title = "Settings and reasons" if advice.settings else "Reasons"
    console.print(f"\n{title}", style="bold")
    if advice.settings is not None:
        chosen = asdict(advice.settings).items()
        options = (
            f"filter.{k}={v:g}" if isinstance(v, float) else f"filter.{k}={v}" for k, v in chosen
        )
        print_line(console, "  " + " ".join(options), style="green")
    for reason in advice.reasons:
        console.print(
            Padding(f"· {reason}", (0, 0, 0, 2), expand=False)
            if console.is_terminal
            else f"  · {reason}"
        )


def _bars(histogram: Histogram, width: int) -> list[str]:
    """One line per bin, with a bar relative to the fullest."""
    rows = [("0", histogram.num_zero)]
    for low, high, count in zip(
        histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True
    ):
        rows.append((f"{low:.3g} – {high:.3g}", int(count)))
    fullest = max(count for _, count in rows)
    label_width = max(len(label) for label, _ in rows)
    longest = max(1, min(BAR_WIDTH, width - label_width - len(f"   {fullest} ")))
    bars = ("█" * round(longest * count / fullest) or "▏" * (count > 0) for _, count in rows)
    return [
        f"  {label:>{label_width}} {bar} {count}"
        for (label, count), bar in zip(rows, bars, strict=True)
    ]


def _effects_table(advice: BatchAdvice) -> Table:
    from rich import box
    from rich.table import Table

    has_step = advice.effects[0].step_saved is not None
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for name in ("top_p", "groups kept", "variance kept", "update saved"):
        table.add_column(name, justify="right")
    if has_step:
        table.add_column("step saved", justify="right")
    for effect in advice.effects:
        shares = [effect.kept_fraction, effect.kept_mass, effect.update_saved]
        if effect.step_saved is not None:
            shares.append(effect.step_saved)
        table.add_row(f"{effect.rho:g}", *(f"{share:.0%}" for share in shares))
    return table


def _show_causes(console: Console, advice: BatchAdvice, batch: RewardGroups, num: int) -> None:
    from moored.algo.causes import CAUSES

    prompts = _example_prompts(advice, batch, num)
    always = ("too_easy", "too_hard", "reward_blind")
    for cause in CAUSES:
        count = len(getattr(advice.plain.triage, cause))
        if count or cause in always:
            name = "reward-blind" if cause == "reward_blind" else cause.replace("_", " ")
            unknown = cause == "reward_blind" and batch.behaviours is None
            share = (
                "unknown, the file has no responses"
                if unknown
                else f"{count} ({advice.plain.triage.share(cause):.0%})"
            )
            console.print(f"  {name:<13}{share}")
        for prompt in prompts[cause]:
            line = f"    {prompt}"
            console.print(line, style="dim", no_wrap=True, overflow="ellipsis")
