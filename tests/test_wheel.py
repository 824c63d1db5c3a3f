"""The wheel holds everything the package reads, and works in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from moored import __version__

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built with what is installed: no index is asked."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", folder, ROOT],
        check=True,
        cwd=folder,
    )
    (found,) = folder.glob("*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    package = ROOT / "moored"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == wanted
    # Presets, models and their weights are data, which packaging forgets first.
    assert {"moored/presets/smoke.yaml", "moored/models/nano/model.safetensors"} <= inside


def test_the_installed_command_works_outside_the_repository(wheel, tmp_path):
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", wheel], check=True, cwd=tmp_path)
    # The dependencies come from this environment; its own moored, linked by a .pth file, does not.
    (site,) = (home / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={})
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import moored; print(moored.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    moored = str(home / "bin" / "moored")
    assert run(moored, "--version") == f"moored {__version__}\n"
    assert "sokoban" in run(moored, "envs")
    assert "embedded" in run(moored, "models")
    assert run(moored, "config", "smoke").startswith("seed: 0 ")
