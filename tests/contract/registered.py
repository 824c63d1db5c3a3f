"""The environments that tests play as they are; `code` only where its sandbox can be used."""

from __future__ import annotations

import shutil

import pytest

from moored.envs.describe import playable_names

has_bubblewrap = shutil.which("bwrap") is not None
needs_bubblewrap = pytest.mark.skipif(not has_bubblewrap, reason="bubblewrap is not installed")
every_environment = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_bubblewrap if name == "code" else ())
        for name in playable_names()
    ],
)
