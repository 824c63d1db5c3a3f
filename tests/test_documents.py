"""README and examples run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moored import __version__

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout


def test_the_readme_example_gives_selection_advice_and_report():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    lines = run("-c", blocks[0]).splitlines()
    assert lines[0].startswith("[0 3] Std/Mean of RV is")
    assert lines[1].startswith("diverse Interval(low=")
    assert float(lines[1].split()[-1]) < 0.01


def test_the_readme_fits_one_screen_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 60
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(script):
    assert run(str(script)).strip()


def test_the_example_tells_health_from_collapse():
    text = run("examples/00_select_and_diagnose.py")
    assert "train on prompts [0, 2, 5]" in text
    assert "healthy: diverse" in text
    assert "collapsed: template_collapse" in text


def test_every_example_is_listed_and_numbered_without_a_gap():
    names = [path.name for path in sorted((ROOT / "examples").glob("*.py"))]
    assert [name[:3] for name in names] == [f"{number:02d}_" for number in range(len(names))]
    text = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"\[(\S+\.py)\]\(\1\)", text) == names


def test_the_newest_version_is_in_the_changelog_and_the_citation():
    version = __version__.partition(".dev")[0]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert "2604.06268" in citation["references"][0]["url"]
