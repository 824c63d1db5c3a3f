"""The figures of a report as PNG files, drawn by the Chromium that is installed.

One browser draws them all: Plotly makes each figure a picture, as text in the page, and the browser
prints the page when it is done.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moored.analysis.report import Drawn
from moored.analysis.report_page import figures_json
from moored.errors import ConfigError, MooredError

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
