"""Studies that run nothing themselves: correlations over the runs of other studies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moored.cli.console import make_console, print_line
from moored.errors import ConfigError, MooredError

if TYPE_CHECKING:
    from moored.analysis.correlate import Correlation, Estimate
    from moored.studies.declaration import Study


def analyse(study: Study, folders: Sequence[Path], out: Path) -> None:
    """Correlate every diagnostic with success over the runs of studies; print and store."""
    from rich import box
    from rich.table import Table

    from moored.analysis.correlate import correlate
    from moored.runlog.log import write_atomically
    from moored.studies.folder import check_owner, provenance

    check_owner(out, study)
    sources = list(folders) or _existing([Path("runs") / name for name in study.of])
    curves, left_out = _read(sources)
    found = correlate(curves)
    lines = [["diagnostic", "Spearman", "Pearson", "within runs, lag 0", "strongest lag", "runs"]]
    lines += [_line(each) for each in found]
    console = make_console()
    print_line(console, f"{study.name}: {study.question}")
    table = Table(*lines[0], box=box.SIMPLE_HEAD, header_style="bold")
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)
    print_line(console, "Against final success; brackets are 95 % bootstrap intervals over runs.")
    for path, reason in left_out.items():
        print_line(console, f"left out: {path}: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    runs = [str(run.path) for run in curves]
    head = {"schema": 1, "study": study.name, "paper": study.paper, **provenance(), "runs": runs}
    write_atomically(out / "study.json", json.dumps(head, indent=1) + "\n")
    values = {**head, "correlations": [asdict(each) for each in found], "left_out": left_out}
    write_atomically(out / "results.json", json.dumps(values, indent=1) + "\n")
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    write_atomically(out / "results.md", f"# {study.name}\n\n{study.question}\n\n{text}")
    print_line(console, f"table: {out / 'results.md'}, {out / 'results.json'}")


def _line(found: Correlation) -> list[str]:
    at_once = found.by_lag.get(0)
    return [
        found.name,
        _cell(found.spearman),
        _cell(found.pearson),
        "–" if at_once is None else _cell(at_once),
        "–" if found.best_lag is None else f"{found.best_lag:+d}",
        str(found.num_runs),
    ]


def _cell(estimate: Estimate) -> str:
    return f"{estimate.value:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}]"


def _existing(folders: Sequence[Path]) -> list[Path]:
    found = [folder for folder in folders if folder.is_dir()]
    if not found:
        names = ", ".join(str(folder) for folder in folders)
        raise ConfigError(
            f"none of {names} exists; run one of these studies first, or name folders of studies"
        )
    return found


def _read(folders: Sequence[Path]) -> tuple[list, dict[str, str]]:
    """The curves of all run directories in the folders."""
    from moored.analysis.correlate import read_curves

    curves, left_out = [], {}
    for folder in folders:
        configs = sorted(folder.rglob("config.yaml"))
        if not configs:
            raise ConfigError(f"{str(folder)!r} holds no run; give the folder of a study")
        for config in configs:
            try:
                curves.append(read_curves(config.parent))
            except MooredError as error:
                left_out[str(config.parent)] = str(error)
    return curves, left_out
