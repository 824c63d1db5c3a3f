"""A report as one HTML page that works without a network, and its figures as PNG files.

Plotly's script is inside the page, once. Texts of rollouts are shown as they are, so the template
escapes everything. The page may run only the two scripts whose hashes it names, and may load
nothing. PNG files are drawn by the Chromium that is installed: one browser makes each figure a
picture, as text in the page, and prints the page when it is done.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import datetime
from importlib.resources import files as package_files
from pathlib import Path

from moored.analysis.report import Drawn, Report
from moored.errors import ConfigError, MooredError, require_packages
from moored.runlog.log import is_special, write_atomically

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
WIDTH, SCALE = 760, 2
MOST_SECONDS = 300
PAGE = """<!DOCTYPE html><meta charset="utf-8"><body><script>{plotly}</script>
<script>
const figures = {figures};
(async () => {{
  const made = {{}};
  for (const [slug, figure] of Object.entries(figures)) {{
    const top = figure.layout.margin.t + 40;
    const layout = {{...figure.layout, paper_bgcolor: "#ffffff",
      title: {{text: figure.title, x: 0.02, y: 1, yanchor: "top", pad: {{t: 10}},
        font: {{size: 15}}}},
      font: {{...figure.layout.font, color: "#1c2430"}},
      legend: {{...figure.layout.legend, maxheight: 10000}},
      margin: {{...figure.layout.margin, t: top}}, width: {width}}};
    const plot = document.body.appendChild(document.createElement("div"));
    await Plotly.newPlot(plot, figure.data, layout);
    const names = plot.querySelector(".legend .bg");
    const above = names ? names.getBBox().height : 0;
    const height = figure.layout.height + 40 + above;
    await Plotly.relayout(plot, {{height, "margin.t": top + above}});
    const size = {{format: "png", width: {width}, height, scale: {scale}}};
    made[slug] = (await Plotly.toImage(plot, size)).split(",")[1];
    plot.remove();
  }}
  document.body.innerHTML = "<pre>" + JSON.stringify(made) + "</pre>";
}})();
</script></body>"""


def check_can_write(file: Path, option: str) -> None:
    """Raise before anything is read when the page could not be written."""
    folder = str(file.parent)
    if file.is_dir():
        raise ConfigError(f"{option} needs a file, got the folder {str(file)!r}")
    if not file.parent.is_dir():
        raise ConfigError(f"{option}: the folder {folder!r} does not exist; make it first")
    if not is_special(file) and not os.access(file.parent, os.W_OK):
        raise ConfigError(f"the folder {folder!r} cannot be written to; choose another: {option}")


def check_can_draw() -> None:
    """Raise before anything is read when the figures could not be drawn."""
    require_packages("a report", ["plotly"])


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
        style=Markup(_read("report.css")),
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


def find_browser() -> str:
    """The first Chromium or Chrome on the PATH."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise MooredError(
            "--png needs Chromium or Chrome, and none is on the PATH; install one, e.g. "
            "apt-get install chromium, or leave --png out"
        )
    return found


def write_pictures(folder: Path, figures: Mapping[str, Drawn]) -> dict[str, Path]:
    """Write `SLUG.png` for every figure; returns their paths."""
    from plotly.offline import get_plotlyjs

    browser = find_browser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--png needs a folder, got the file {str(folder)!r}")
    with tempfile.TemporaryDirectory() as made:
        page = Path(made) / "figures.html"
        text = PAGE.format(
            plotly=get_plotlyjs(), figures=figures_json(figures), width=WIDTH, scale=SCALE
        )
        page.write_text(text, encoding="utf-8")
        pictures = _run(browser, page)
    missing = [slug for slug in figures if slug not in pictures]
    if missing:
        raise MooredError(f"{browser} did not draw {missing[0]!r}; try a newer Chromium")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {slug: folder / f"{slug}.png" for slug in figures}
    for slug, path in paths.items():
        path.write_bytes(base64.b64decode(pictures[slug]))
    return paths


def _run(browser: str, page: Path) -> dict[str, str]:
    """Slug -> picture in base64, from the page as the browser leaves it."""
    words = [browser, *FLAGS, f"--user-data-dir={page.parent / 'profile'}"]
    words += ["--virtual-time-budget=600000", "--dump-dom", page.as_uri()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MooredError(f"{browser} could not draw the figures: {error}") from error
    found = re.search(r"<pre>(\{.*\})</pre>", done.stdout)
    if found is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise MooredError(f"{browser} could not draw the figures: {last}")
    return json.loads(found[1])
