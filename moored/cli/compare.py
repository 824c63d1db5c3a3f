"""`moored compare`: the ends of several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from moored.cli.console import make_console
from moored.cli.options import AsJson
from moored.errors import MooredError


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")], as_json: AsJson = False
) -> None:
    """Put the ends of several runs side by side."""
    rows = {str(path): _summary(path) for path in runs}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.table import Table

    names = [path.name for path in runs]
    headers = names if len(set(names)) == len(names) else list(rows)
    table = Table("", *headers, box=box.SIMPLE_HEAD, header_style="bold")
    for figure in next(iter(rows.values())):
        table.add_row(figure, *(_cell(row[figure]) for row in rows.values()))
    make_console().print(table)


def _summary(path: Path, window: int = 5) -> dict[str, object]:
    """Means over the last `window` steps and looks; regime and alarm as they stand."""
    from moored.runlog.log import read_records

    steps, looks = read_records(path), read_records(path, "collapse")
    if not steps:
        raise MooredError(f"{str(path)!r} has no finished step yet; nothing to compare")

    def mean(records: Sequence[Mapping[str, object]], key: str) -> float | None:
        values = [r[key] for r in records[-window:] if isinstance(r.get(key), float | int)]
        return sum(map(float, values)) / len(values) if values else None  # pyright: ignore[reportArgumentType]

    view = "collapse_first_turn_sample"
    alarms = [look["step"] for look in looks if look.get("alarm")]
    return {
        "steps": steps[-1]["step"],
        "success": mean(steps, "rollout/success_rate"),
        "validity": mean(steps, "rollout/validity_rate"),
        "retrieval": mean(looks, f"{view}/retrieval_accuracy"),
        "chance": mean(looks, f"{view}/retrieval_chance_level"),
        "MI": mean(looks, f"{view}/mi_estimate"),
        "H(Z|X)": mean(looks, f"{view}/conditional_entropy_est"),
        "regime": looks[-1]["regime"] if looks else None,
        "alarm step": alarms[0] if alarms else None,
    }


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
