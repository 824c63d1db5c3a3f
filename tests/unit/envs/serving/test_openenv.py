"""OpenEnv's own client plays an environment that moored serves; skipped without its package."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.env_server import serve_env

pytest.importorskip("uvicorn")

PLAY = """
import json, sys
from openenv.core.generic_client import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    first = env.reset(seed=3)
    step = env.step({"reply": "no tags"})
    print(json.dumps([first.observation["text"][:16], first.done, step.reward, step.done]))
    print(env.state()["step_count"])
"""


def test_openenvs_own_client_plays_with_the_token_as_a_password() -> None:
    python = os.environ.get("MOORED_OPENENV_PYTHON")
    if python is None and importlib.util.find_spec("openenv") is None:
        pytest.skip("needs openenv-core here, or in the Python that MOORED_OPENENV_PYTHON names")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with serve_env("sokoban", token="secret") as (url, _):
        address = url.replace("://", "://moored:secret@")
        command = [python or sys.executable, "-c", PLAY, address]
        shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    lines = shown.stdout.splitlines()
    assert json.loads(lines[0]) == ["You play Sokoban", False, -0.1, False]
    assert lines[1] == "1"
