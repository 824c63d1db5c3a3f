"""What hostile programs aim at, and how one is run."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moored.envs.code.sandbox import Job, Outcome, SandboxPool

LIMIT_S = 0.2
MARGIN_S = 0.5


@dataclass(frozen=True)
class Host:
    """What hostile programs aim at."""

    secret: Path
    marker: Path
    listener: socket.socket
    victim: subprocess.Popen[bytes]

    def aim(self, source: str) -> str:
        places = {
            "@SECRET@": str(self.secret),
            "@MARKER@": str(self.marker),
            "@PORT@": str(self.listener.getsockname()[1]),
            "@PID@": str(self.victim.pid),
        }
        for word, place in places.items():
            source = source.replace(word, place)
        return source

    def is_unharmed(self) -> bool:
        return (
            self.secret.read_text() == "treasure"
            and not self.marker.exists()
            and self.victim.poll() is None
            and not self.has_caller()
        )

    def has_caller(self) -> bool:
        self.listener.settimeout(0.0)
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def run_one(pool: SandboxPool, source: str, wall_s: float = LIMIT_S) -> Outcome:
    return pool.run(Job(kind="stdin", source=source, tests=("",), wall_s=wall_s))[0]
