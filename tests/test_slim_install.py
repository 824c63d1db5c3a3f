"""The maths imports without torch, transformers and other heavy packages."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

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
