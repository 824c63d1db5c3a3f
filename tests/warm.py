"""Processes that start with their packages imported, for tests of real commands.

A training command imports torch and transformers for four seconds, most of the time of a test that
runs it; any other command imports for half a second. One server per test process imports them once
and forks; a fork is a process of its own, with its own signals, working directory, environment and
exit code. A slim server has imported no package of an extra, so that a slim fork tells whether a
command imports one. Other tests about imports need `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

ROOT = Path(__file__).parent.parent
MAIN = "from moored.cli.main import main; main()"
SCRIPT = (
    "import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0]); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
POLL_S = 0.005
# Of torch, and of the allocator of pyarrow: a fork would lose them.
WITHOUT_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


class WarmProcess:
    """`python -c code words…` as a fork of the server; used like `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        code: str = MAIN,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        merge_stderr: bool = False,
        slim: bool = False,
    ) -> None:
        self._server = _Server.of("slim" if slim else "whole")
        out, out_end = os.pipe()
        err, err_end = (None, out_end) if merge_stderr else os.pipe()
        request = {
            "code": code,
            "words": [str(word) for word in words],
            "cwd": str(cwd or Path.cwd()),
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        }
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), out_end, err_end]
            self.pid: int = self._server.ask(request, files)
        for end in {out_end, err_end}:
            os.close(end)
        self.stdout: IO[str] = os.fdopen(out, encoding="utf-8")
        self.stderr: IO[str] | None = None if err is None else os.fdopen(err, encoding="utf-8")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout_s: float = math.inf) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s"
            time.sleep(POLL_S)
        return code

    def communicate(self) -> tuple[str, str]:
        """All that it prints until it ends, and its exit code in `returncode`."""
        errors: list[str] = []
        stderr = self.stderr
        reader = threading.Thread(target=lambda: errors.append(stderr.read() if stderr else ""))
        reader.start()
        with self.stdout:
            printed = self.stdout.read()
        reader.join()
        if stderr is not None:
            stderr.close()
        self.wait()
        return printed, errors[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(
    words: Sequence[str | Path],
    *,
    code: str = MAIN,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    slim: bool = False,
) -> subprocess.CompletedProcess[str]:
    """A command run to its end."""
    process = WarmProcess(words, code=code, cwd=cwd, env=env, slim=slim)
    out, err = process.communicate()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def run_script(
    script: Path, *words: str | Path, cwd: Path | None = None, slim: bool = False
) -> subprocess.CompletedProcess[str]:
    """`python script words…` run to its end."""
    return run_warm([script.resolve(), *words], code=SCRIPT, cwd=cwd, slim=slim)


def main_on_full_disk(max_bytes: int) -> str:
    """Code of a command whose files may not be larger; a limit on them stands for the disk.

    Byte code, which Python would cut off there and use ever after, is not written.
    """
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))"
    return f"import resource, sys; sys.dont_write_bytecode = True; {limit}; {MAIN}"


class _Server:
    """The process that forks, and the socket to it."""

    _by_kind: ClassVar[dict[str, _Server]] = {}

    @classmethod
    def of(cls, kind: str) -> _Server:
        if kind not in cls._by_kind:
            cls._by_kind[kind] = cls(kind)
            atexit.register(cls._by_kind[kind].close)
        return cls._by_kind[kind]

    def __init__(self, kind: str) -> None:
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    Path(__file__).with_name("warm_server.py"),
                    str(other.fileno()),
                    kind,
                ],
                pass_fds=[other.fileno()],
                env={**os.environ, **WITHOUT_THREADS, "PYTHONPATH": str(ROOT)},
            )

    def ask(self, request: Mapping[str, object], files: Sequence[int] = ()) -> Any:
        socket.send_fds(self.channel, [json.dumps(request).encode()], list(files))
        answer = self.channel.recv(100)
        assert answer, "the server of warm processes died"
        return json.loads(answer)

    def close(self) -> None:
        self.channel.close()
        self.process.wait()
