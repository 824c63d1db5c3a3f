"""Studies that run nothing themselves: correlations over the runs of other studies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moored.cli.console import make_console, print_line
from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.analysis.correlate import Correlation, Estimate
    from moored.studies.declaration import Study


def analyse(study: Study, given: Sequence[Path], out: Path) -> None:
    """Correlate every diagnostic with success over runs of studies; print and store."""
    from moored.analysis.correlate import correlate
    from moored.analysis.run_curves import read_all
    from moored.cli.study_progress import print_table
    from moored.studies.folder import check_owner

    check_owner(out, study)
    sources = list(given) or _existing([Path("runs") / name for name in study.of])
    curves, left_out = read_all(sources)
    found = correlate(curves)
    tables = [_over_runs(found), _over_time(found)]
    console = make_console()
    print_line(console, f"{study.name}: {study.question}")
    for lines in tables:
        print_table(console, lines, 1)
    print_line(console, _explanation(found))
    for path, reason in left_out.items():
        print_line(console, f"left out: {path}: {reason}")
    _store(study, out, [run.name for run in curves], found, left_out)
    print_line(console, f"table: {out / 'results.md'}, {out / 'results.json'}")


def _store(
    study: Study,
    out: Path,
    runs: Sequence[str],
    found: Sequence[Correlation],
    left_out: dict[str, str],
) -> None:
    from moored.runlog.log import write_atomically
    from moored.studies.folder import provenance

    out.mkdir(parents=True, exist_ok=True)
    head = {"schema": 1, "study": study.name, "paper": study.paper, **provenance()}
    head |= {"runs": list(runs)}
    write_atomically(out / "study.json", json.dumps(head, indent=1) + "\n")
    values = {**head, "correlations": [asdict(each) for each in found], "left_out": left_out}
    write_atomically(out / "results.json", json.dumps(values, indent=1) + "\n")
    tables = "\n".join(_markdown(table) for table in (_over_runs(found), _over_time(found)))
    page = f"# {study.name}\n\n{study.question}\n\n{tables}\n{_explanation(found)}\n"
    write_atomically(
        out / "results.md", page + (f"\nThe paper: {study.paper}\n" * bool(study.paper))
    )


def _over_runs(found: Sequence[Correlation]) -> list[list[str]]:
    """The end of a run against its final success: header, then a line for each diagnostic."""
    arms = list(dict.fromkeys(arm for each in found for arm in each.by_arm))
    shown = arms if len(arms) > 1 else []
    header = ["diagnostic", "Spearman", "Pearson", *(f"arm {arm}" for arm in shown)]
    lines = [[*header, "between seeds", "runs"]]
    for each in found:
        of_arms = [_cell(each.by_arm.get(arm)) for arm in shown]
        cells = [each.name, _cell(each.spearman), _cell(each.pearson), *of_arms]
        lines.append([*cells, _cell(each.between_seeds), str(each.num_runs)])
    return lines


def _over_time(found: Sequence[Correlation]) -> list[list[str]]:
    """Within runs, by the steps from a look to success."""
    lags = sorted({lag for each in found for lag in each.by_lag if lag % 10 == 0})
    lines = [["within runs", *(f"{lag:+d} steps" for lag in lags), "strongest lag"]]
    for each in found:
        cells = [_cell(each.by_lag.get(lag)) for lag in lags]
        best = each.best_lag
        shown = "–" if best is None else f"{best.lag:+d} [{best.low:+d}, {best.high:+d}]"
        lines.append([each.name, *cells, shown])
    return lines


def _explanation(found: Sequence[Correlation]) -> str:
    from moored.analysis.correlate import MIN_SETTINGS

    num_settings = max((each.num_settings for each in found), default=0)
    drawn = "settings" if num_settings >= MIN_SETTINGS else "runs inside their settings"
    return (
        f"Against final success; {num_settings} settings (runs of one setting differ in their seed "
        f"only). Brackets are 95 % bootstrap intervals that draw {drawn}. Arms and between seeds: "
        f"Spearman. Within runs: positive steps mean that the diagnostic comes first."
    )


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}]"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _existing(folders: Sequence[Path]) -> list[Path]:
    found = [folder for folder in folders if folder.is_dir()]
    if not found:
        names = ", ".join(str(folder) for folder in folders)
        raise ConfigError(
            f"none of {names} exists; run one of these studies first, or name folders of studies "
            f"or curve files"
        )
    return found
