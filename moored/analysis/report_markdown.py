"""A report as Markdown: headline, tables and options; figures where they were drawn as PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from moored.analysis.findings import Grid
from moored.analysis.report import Report, Section


def render_markdown(report: Report, pictures: Mapping[str, Path] | None = None) -> str:
    """The report as text; `pictures` are the figures by slug, as paths to link to."""
    lines = [f"# {_plain(report.title)}", "", *map(_plain, report.meaning), ""]
    lines += [f"- {name}: {_plain(value)}" for name, value in report.facts.items()]
    lines += [f"- {_plain(note.text)}" for note in report.notes]
    lines += [f"- Left out: {_plain(path)}: {_plain(why)}" for path, why in report.left_out.items()]
    for section in report.sections:
        lines += _section(section, pictures or {})
    lines += ["", "---", "", f"`{report.command}`; {report.versions}", ""]
    return "\n".join(lines).encode("utf-8", "replace").decode()


def _section(section: Section, pictures: Mapping[str, Path]) -> list[str]:
    """Trajectories are left to the page: Markdown has no folding for that much text."""
    drawn = [figure for figure in section.figures if figure.slug in pictures]
    if not (drawn or section.grids or section.block):
        return []
    lines = ["", f"## {_plain(section.title)}", ""]
    if section.text:
        lines += [_plain(section.text), ""]
    for figure in drawn:
        lines += [f"![{_plain(figure.title)}](<{pictures[figure.slug].as_posix()}>)", ""]
        lines += [_plain(figure.caption), ""] if figure.caption else []
    for caption, grid in section.grids.items():
        lines += [f"### {_plain(caption)}", ""] if caption else []
        lines += [*_table(grid), ""]
    if section.block:
        lines += ["```yaml", section.block.rstrip().replace("```", "'''"), "```"]
    return lines


def _table(grid: Grid) -> list[str]:
    rows = [grid.header, tuple("---" for _ in grid.header), *grid.rows]
    return [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|") or " "


def _plain(text: str) -> str:
    """One line, with what Markdown would take for tags or emphasis shown as it is."""
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", " ".join(text.split()))
