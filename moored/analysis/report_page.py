"""A report as one HTML page that works without a network: Plotly's script is inside it, once.

Texts of rollouts are shown as they are, so the template escapes everything. The page may run only
the two scripts whose hashes it names, and may load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from importlib.resources import files as package_files
from pathlib import Path

from moored.analysis.report import Drawn, Report
from moored.errors import require_packages
from moored.runlog.log import write_atomically

CHECK = "a report"


def check_can_draw() -> None:
    """Raise before anything is read when the figures could not be drawn."""
    require_packages(CHECK, ["plotly"])


def write_report(file: Path, report: Report) -> None:
    """Write the page, whole or not at all."""
    page = render_report(report, made=datetime.now().astimezone())
    write_atomically(file, page)


def render_report(report: Report, *, made: datetime) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), _read("report.js")]
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    page = environment.from_string(_read("report.html")).render(
        report=report,
        style=Markup(_read("page.css") + _read("report.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=Markup(" ".join(map(_hash, scripts))),
        figures=Markup(figures_json(report.figures)),
        date=made.strftime("%Y-%m-%d %H:%M %Z").strip(),
    )
    # Names of files may hold bytes that are not text, and replies a NUL.
    return page.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def figures_json(figures: Mapping[str, Drawn]) -> str:
    """Title and chart of every figure, safe inside a script element."""
    shown = {slug: {"title": d.title, **d.chart} for slug, d in figures.items()}
    text = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read(name: str) -> str:
    return (package_files("moored.analysis") / name).read_text(encoding="utf-8")
