"""How a guest process is started: in bubblewrap, in docker, or without isolation.

`make_isolation(kind)` checks that the kind can be used on this machine, and refuses with a remedy.
An `Isolation` starts guests (`moored.envs.code.guest`) and kills what is left of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import marshal
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from moored.envs.code import guest
from moored.envs.code.seccomp import ARCHITECTURES, seccomp_filter
from moored.errors import EnvError

logger = logging.getLogger(__name__)

Kind = Literal["bubblewrap", "docker", "none"]
GUEST_FILE = Path(guest.__file__)
MEGABYTE = 1 << 20
PYTHON_OPTIONS = ("-s", "-S", "-P")
"""No site-packages, no folder of the script. Not -I, which would ignore PYTHONHASHSEED: the
order of a set must be the same in every run, or the same program would earn different rewards."""
FIRST_UID = 0x60000000
"""As root, each guest becomes a user of its own that owns nothing, counted from here: the limit on
processes does not bind root, and counts all processes of a user."""
NUM_UIDS = 1 << 20
NOBODY = 65534
"""The user and group of a program in a container, where it is alone."""
TRY_LIMIT_S = 60.0
"""For a first try of bubblewrap or docker; a daemon that is stuck never answers."""
SYSTEM_FOLDERS = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Times are given per job, see `sandbox.Job`."""

    memory_mb: int = 512
    """Address space; a program is one process, so this is all of its memory."""
    num_tasks: int = 64
    """Threads."""
    num_files: int = 64
    """Open files."""
    file_mb: int = 16
    """Size of a file."""
    tmp_mb: int = 32
    """All files in /tmp, which lives in memory."""
    num_tmp_files: int = 10_000
    """Files, folders and links in /tmp: each takes a kilobyte or more of the kernel's memory."""
    output_kb: int = 1024
    """Output of a test."""


class Isolation(Protocol):
    """Starts guest processes."""

    def start(self) -> Guest: ...


@dataclass(slots=True)
class Guest:
    """A guest process; its job goes to `process.stdin`, results come from `process.stdout`."""

    process: subprocess.Popen[bytes]
    is_wrapped: bool = False
    """Its process is bwrap, which waits for the sandbox."""
    container: str = ""
    """Name of its docker container."""
    folder: tempfile.TemporaryDirectory[str] | None = None
    """Where a guest without isolation works."""

    def kill(self) -> None:
        """Kill it and all it started; `is_gone` tells when it has ended."""
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not self.is_wrapped and not self.container:
            self._kill_group()
        # A container ends with its standard input.
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def is_gone(self, wait_s: float = 0.0) -> bool:
        """True when the process has been reaped and its folder removed; kills what outlives it."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            if wait_s:
                self._kill_container()
                self._kill_group()
            return False
        if self.folder is not None:
            self.folder.cleanup()
        return True

    def num_tmp_files(self) -> int:
        """What there is in the /tmp of a bubblewrap, 0 when it has ended and for other kinds."""
        for pid in self._children():
            with contextlib.suppress(OSError):
                found = os.statvfs(f"/proc/{pid}/root/tmp")
                return found.f_files - found.f_ffree
        return 0

    def _children(self) -> list[int]:
        """The first process of the sandbox; with it the kernel kills all others in there.

        bwrap itself then reaps it and exits. Killing bwrap would leave the reaping to process 1,
        which in many containers never does it.
        """
        if not self.is_wrapped or self.process.poll() is not None:
            return []
        pid = self.process.pid
        try:
            return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        except OSError:
            return []

    def _kill_container(self) -> None:
        """Killing the client alone would leave the container running."""
        if self.container:
            command = ["docker", "rm", "--force", self.container]
            subprocess.run(command, capture_output=True, check=False)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()


def make_isolation(kind: Kind, limits: Limits, *, image: str = "python:3.11-slim") -> Isolation:
    """The isolation of this name, or an EnvError that says why it cannot be used here."""
    if kind == "none":
        return Bare(limits)
    if kind == "docker":
        program = _require_program("docker", "install it, set sandbox=bubblewrap")
        isolation = Docker(program, image, limits)
        _check_docker(isolation)
        return isolation
    if sys.platform != "linux":
        raise EnvError(
            f"code: programs run under bubblewrap, which exists for Linux, not for {sys.platform}; "
            f"set sandbox=docker"
        )
    program = _require_program("bwrap", "apt-get install bubblewrap, set sandbox=docker")
    isolation = Bubblewrap(program, limits, is_root=os.geteuid() == 0)
    _check_starts(isolation)
    return isolation


def _require_program(name: str, remedy: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise EnvError(
            f"code: programs that a model wrote run in a sandbox, and {name} is not installed; "
            f"{remedy}, or, only if you trust every program, set sandbox=none"
        )
    return found


@functools.cache
def _check_docker(isolation: Docker) -> None:
    """Try docker once per process: without daemon, image or Python every program would fail."""
    image, name = isolation.image, f"moored-{uuid.uuid4().hex}"
    tried = _try([*isolation.options(name), *PYTHON_OPTIONS, "-c", "import ctypes"])
    if tried.returncode:
        raise EnvError(
            f"code: docker cannot run a program in the image {image!r} "
            f"({tried.stderr.strip()[-200:] or f'exit code {tried.returncode}'}); start its "
            f"daemon, docker pull {image}, or name an image with Python 3.11 or newer"
        )


def _try(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        return subprocess.run(command, **options, timeout=TRY_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        late = f"no answer within {TRY_LIMIT_S:g} s"
        return subprocess.CompletedProcess(command, returncode=1, stderr=late)


@functools.cache
def _check_starts(isolation: Bubblewrap) -> None:
    """Try bubblewrap once per process: a container or a kernel setting may forbid namespaces."""
    command = [isolation.program, *isolation.options(), "--", *_python(), "-c", ""]
    tried = _try(command)
    if tried.returncode:
        raise EnvError(
            f"code: bubblewrap is installed but cannot start a program here "
            f"({tried.stderr.strip()[:200] or f'exit code {tried.returncode}'}); allow user "
            f"namespaces (sysctl kernel.unprivileged_userns_clone=1, or --privileged for a "
            f"container), or set sandbox=docker"
        )


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """No network, a tree of Python and system libraries alone, read-only but for /tmp."""

    program: str
    limits: Limits
    is_root: bool
    """Whether this process is root, see `_as_root` and `_as_user`."""

    def start(self) -> Guest:
        rules_fd, guest_fd = _readable(seccomp_filter()), _readable(_guest_bytecode())
        try:
            uid = next(_uids) if self.is_root else 0
            words = [self.program, "--perms", "0644", "--file", str(guest_fd), "/guest.pyc"]
            words += [*self.options(), "--seccomp", str(rules_fd), "--", *_python(), "/guest.pyc"]
            words += _guest_arguments(self.limits, uid, self.limits.num_tasks)
            # A program may read the environment of bwrap, which is process 1 in there.
            process = _popen(words, pass_fds=(rules_fd, guest_fd), env={})
            return Guest(process, is_wrapped=True)
        finally:
            os.close(rules_fd)
            os.close(guest_fd)

    def options(self) -> list[str]:
        """Options of bwrap up to the command."""
        base = Path(sys.base_prefix)
        python = Path(sys.executable).resolve()
        tmp_bytes = str(self.limits.tmp_mb * MEGABYTE)
        return [
            *(_as_root() if self.is_root else _as_user()),
            *["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"],
            *["--unshare-cgroup-try", "--die-with-parent", "--new-session"],
            *["--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"],
            *["--setenv", "LD_LIBRARY_PATH", "/python/lib", "--hostname", "sandbox"],
            # Otherwise each thread reserves 64 MB of the address space.
            *["--setenv", "MALLOC_ARENA_MAX", "1"],
            # The folders that bwrap makes on the way to a mount are closed to others than root.
            *["--perms", "0755", "--dir", "/usr", "--perms", "0755", "--dir", "/python"],
            *["--perms", "0755", "--dir", "/python/bin"],
            *(word for folder in SYSTEM_FOLDERS for word in _system_folder(folder)),
            *["--ro-bind", str(base / "lib"), "/python/lib"],
            *["--ro-bind", str(python), "/python/bin/python3"],
            *(
                word
                for path in _package_folders()
                for word in ("--tmpfs", path, "--remount-ro", path)
            ),
            *["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"],
            *["--perms", "1777", "--size", tmp_bytes, "--tmpfs", "/tmp"],
            *["--remount-ro", "/", "--chdir", "/tmp"],
        ]


_uids = itertools.cycle(range(FIRST_UID + os.getpid() % NUM_UIDS, FIRST_UID + 2 * NUM_UIDS))


def _as_root() -> list[str]:
    """Root needs no user namespace: the guest gives up root, and with it all capabilities.

    Process 1 of the sandbox, which is bwrap, stays root: the guest cannot reach it.
    """
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _as_user() -> list[str]:
    """The guest is process 1 and alone: as another process of its user, without its limits, bwrap
    would let a program write to its memory, and so run code there."""
    words = ["--unshare-user", "--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [*words, "--as-pid-1"]


def _system_folder(folder: str) -> list[str]:
    path = Path(folder)
    if path.is_symlink():
        return ["--symlink", os.readlink(path), folder]
    return ["--ro-bind", folder, folder] if path.is_dir() else []


@functools.cache
def _package_folders() -> list[str]:
    """Folders of installed packages among those that a program sees, by their names in there.

    A program may read all that it sees: this package, with the answers to its tasks, may be one.
    """
    shown = {folder: Path(folder) for folder in SYSTEM_FOLDERS if not Path(folder).is_symlink()}
    shown["/python/lib"] = Path(sys.base_prefix) / "lib"
    return sorted(
        f"{name}/{found.relative_to(folder)}"
        for name, folder in shown.items()
        for found in folder.glob("python3*/*-packages")
        if found.is_dir() and not found.is_symlink()
    )


def _python() -> list[str]:
    return ["/python/bin/python3", *PYTHON_OPTIONS]


def _readable(data: bytes) -> int:
    """A descriptor to read `data` from; it fits into the buffer of a pipe."""
    read_fd, write_fd = os.pipe()
    with open(write_fd, "wb") as stream:
        stream.write(data)
    return read_fd


@functools.cache
def _guest_bytecode() -> bytes:
    """The guest compiled, as the content of a .pyc file: compiling it anew takes 3 ms."""
    code = compile(GUEST_FILE.read_bytes(), GUEST_FILE.name, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


@dataclass(frozen=True, slots=True)
class Docker:
    """A container per guest: no network, read-only but for /tmp, nothing written to a log.

    The guest comes as an argument, not as a mounted file, which a daemon elsewhere could not see.
    """

    program: str
    image: str
    limits: Limits

    def start(self) -> Guest:
        name = f"moored-{uuid.uuid4().hex}"
        return Guest(_popen(self.command(name)), container=name)

    def command(self, name: str) -> list[str]:
        # The limit on processes is that of the container.
        filters = [f"{machine}={seccomp_filter(machine).hex()}" for machine in ARCHITECTURES]
        source = GUEST_FILE.read_text(encoding="utf-8")
        numbers = _guest_arguments(self.limits, NOBODY, 0)
        return [*self.options(name), *PYTHON_OPTIONS, "-c", source, *numbers, *filters]

    def options(self, name: str) -> list[str]:
        """The command up to `python3`."""
        limits = self.limits
        memory = f"{limits.memory_mb + limits.tmp_mb}m"
        return [
            *[self.program, "run", "--rm", "--interactive", "--pull", "never", "--name", name],
            *["--network", "none", "--ipc", "none", "--log-driver", "none", "--read-only"],
            *["--tmpfs", f"/tmp:size={limits.tmp_mb}m,mode=1777", "--workdir", "/tmp"],
            *["--memory", memory, "--memory-swap", memory, "--cpus", "1"],
            *["--pids-limit", str(limits.num_tasks), "--security-opt", "no-new-privileges"],
            # The guest gives up root, and with it these capabilities.
            *["--user", "0:0", "--cap-drop", "ALL", "--cap-add", "SETUID", "--cap-add", "SETGID"],
            *["--env", "PYTHONHASHSEED=0", "--env", "MALLOC_ARENA_MAX=1", "--env", "HOME=/tmp"],
            *["--entrypoint", "python3", self.image],
        ]


@dataclass(frozen=True, slots=True)
class Bare:
    """A plain child process: limits on its resources, and no isolation at all."""

    limits: Limits

    def start(self) -> Guest:
        folder = tempfile.TemporaryDirectory(prefix="moored-code-", ignore_cleanup_errors=True)
        words = [sys.executable, *PYTHON_OPTIONS, str(GUEST_FILE)]
        words += _guest_arguments(self.limits, 0, 0)
        environ = {"PYTHONHASHSEED": "0"}
        return Guest(_popen(words, cwd=folder.name, env=environ), folder=folder)


def _guest_arguments(limits: Limits, uid: int, num_tasks: int) -> list[str]:
    numbers = (
        uid,
        limits.memory_mb * MEGABYTE,
        num_tasks,
        limits.num_files,
        limits.file_mb * MEGABYTE,
    )
    return list(map(str, numbers))


def _popen(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        pass_fds=pass_fds,
        cwd=cwd,
        env=env,
        # Ctrl-C is for this process, which then kills the guest.
        start_new_session=True,
    )
