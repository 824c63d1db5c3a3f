"""`moored check-env`: does an environment keep the rules training relies on?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from moored.cli.console import counted, make_console, print_line, printable
from moored.cli.json_output import print_json
from moored.cli.options import AsJson, EnvName, EnvOptions, parse_options

if TYPE_CHECKING:
    from rich.console import Console

    from moored.envs.check.runner import CheckReport

MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "skipped": ("–", "yellow")}
"""Status of a check -> its sign and colour."""


def check_env_command(name: EnvName, option: EnvOptions = None, as_json: AsJson = False) -> None:
    """Check that an environment keeps the rules of training."""
    from moored.envs.check.runner import check_env

    with make_console(stderr=True).status("checking") as status:
        report = check_env(
            name,
            options=parse_options(option or []),
            progress=lambda check: status.update(f"checking {check}"),
        )
    if as_json:
        print_json(_report_dict(report))
    else:
        _show(make_console(), report)
    if not report.ok:
        raise typer.Exit(1)


def _show(console: Console, report: CheckReport) -> None:
    """One line for each check; a failed one begins with the rule that was broken."""
    from rich.text import Text

    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        line = Text.assemble(MARKS[check.status], f" {check.name:<{width}}  ")
        if check.status == "failed":
            line.append(f"{check.claim}\n", "bold").append(" " * (width + 4))
        console.print(line.append(printable(check.detail)), soft_wrap=True)
    print_line(console, _verdict(report))


def _report_dict(report: CheckReport) -> dict[str, object]:
    from dataclasses import asdict

    return {"env": report.env, "ok": report.ok, "checks": [asdict(x) for x in report.checks]}


def _verdict(report: CheckReport) -> str:
    if not report.ok:
        names = ", ".join(check.name for check in report.failed)
        return f"{report.env} breaks {counted(len(report.failed), 'rule')}: {names}."
    skipped = sum(check.status == "skipped" for check in report.checks)
    note = f" ({skipped} could not be checked)" if skipped else ""
    return f"{report.env} keeps the rules{note}."
