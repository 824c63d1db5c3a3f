"""The environments that tests play as they are; `code` only where its sandbox can be used."""

from __future__ import annotations

import pytest

from moored.envs.code.isolation import Limits, make_isolation
from moored.envs.describe import playable_names
from moored.errors import EnvError


def _why_not() -> str:
    try:
        make_isolation("bubblewrap", Limits())
    except EnvError as error:
        return str(error)
    return ""


has_bubblewrap = not _why_not()
needs_bubblewrap = pytest.mark.skipif(not has_bubblewrap, reason=_why_not() or "it is there")
every_environment = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_bubblewrap if name == "code" else ())
        for name in playable_names()
    ],
)
