"""The maths imports without torch, transformers and other heavy packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from moored.runlog.sinks import SINKS

ROOT = Path(__file__).parent.parent
HEAVY = ["torch", "transformers", "PIL", "pyarrow", "gymnasium", "trl", "verl"]

PROBE = """
import sys
import moored.algo, moored.diagnostics, moored.envs, moored.runlog.log, moored.config
for name in moored.envs.ENVIRONMENTS:
    moored.envs.ENVIRONMENTS.get_object(name)
print(",".join(name for name in {heavy!r} if name in sys.modules))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout.strip()


def test_importing_the_maths_pulls_in_nothing_heavy():
    assert run(PROBE.format(heavy=HEAVY)) == ""


def test_the_probe_sees_a_heavy_import():
    assert run("import PIL\n" + PROBE.format(heavy=HEAVY)) == "PIL"


def test_base_dependencies_are_the_slim_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert names == {"httpx2", "jinja2", "numpy", "pydantic", "pyyaml", "rich", "typer"}


def test_every_extra_has_a_user_and_every_hint_an_extra():
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    sources = [*(ROOT / "moored").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    hinted = {
        name for names in re.findall(r"moored\[([a-z,]+)\]", text) for name in names.split(",")
    }
    # The hint of a sink is made from its name.
    assert hinted | set(SINKS) | {"dev"} == extras
