"""`torchrun -m -- moored …` without torchrun: every rank a warm process, with its variables."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from tests.warm import WarmProcess

CODE = "import sys; sys.argv[0] = 'moored/__main__.py'; from moored.__main__ import run; run()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(
    size: int, words: Sequence[str | Path], *, cwd: Path, port: int | None = None
) -> list[WarmProcess]:
    """The command on every rank, as processes of their own."""
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
    }
    return [
        WarmProcess(words, code=CODE, cwd=cwd, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(size)
    ]


def finish_ranks(ranks: Sequence[WarmProcess], expect: int = 0) -> tuple[str, str]:
    """What rank 0 printed; the others print nothing, and all end with the code `expect`."""
    out, err = ranks[0].communicate()
    assert ranks[0].returncode == expect, err
    for follower in ranks[1:]:
        printed = follower.communicate()
        assert printed == ("", ""), printed
        assert expect or follower.returncode == 0
    return out, err
