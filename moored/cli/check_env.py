"""`moored check-env`: does an environment keep the rules training relies on?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from moored.cli.console import make_console
from moored.cli.options import AsJson, EnvName, EnvOptions, parse_options

if TYPE_CHECKING:
    from rich.table import Table

    from moored.envs.check.runner import CheckReport


def check_env_command(name: EnvName, option: EnvOptions = None, as_json: AsJson = False) -> None:
    """Check that an environment keeps the rules training relies on."""
    from moored.envs.check.runner import check_env

    with make_console(stderr=True).status("checking") as status:
        report = check_env(
            name,
            options=parse_options(option or []),
            progress=lambda check: status.update(f"checking {check}"),
        )
    if as_json:
        print(json.dumps(_report_dict(report), indent=2))
    else:
        make_console().print(_report_table(report))
        print(_verdict(report))
    if not report.ok:
        raise typer.Exit(1)


def _report_table(report: CheckReport) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    marks = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "skipped": "[yellow]–[/]"}
    table = Table("", "check", "seen", box=box.SIMPLE_HEAD, header_style="bold")
    for check in report.checks:
        seen = escape(check.detail)
        if check.status == "failed":
            seen = f"[bold]{escape(check.claim)}[/]\n{seen}"
        table.add_row(marks[check.status], check.name, seen)
    return table


def _report_dict(report: CheckReport) -> dict[str, object]:
    from dataclasses import asdict

    return {"env": report.env, "ok": report.ok, "checks": [asdict(x) for x in report.checks]}


def _verdict(report: CheckReport) -> str:
    if not report.ok:
        names = ", ".join(check.name for check in report.failed)
        return f"{report.env} breaks {len(report.failed)} rule(s): {names}."
    skipped = sum(check.status == "skipped" for check in report.checks)
    note = f" ({skipped} could not be checked)" if skipped else ""
    return f"{report.env} keeps the rules{note}."
