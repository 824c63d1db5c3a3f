"""One writer at a time: `RUN/lock` is locked as long as a process writes to the run directory.

The operating system frees the lock when the process ends, even after `kill -9`, so none is left
over. The file says who holds it: pid and host, because a run directory may be on a shared disk.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from moored.errors import RunLogError

logger = logging.getLogger(__name__)

NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a disk without locks answers, e.g. Lustre without the mount option `flock`."""


@dataclass(slots=True)
class _Held:
    file: int
    num_users: int = 1


_held: dict[tuple[int, int, int], _Held] = {}
"""Locks of this process, by pid, device and inode. A forked child has none of its parent's."""


class FolderLock:
    """The lock of a run directory, held until it is closed or forgotten.

    It belongs to the process: taking it again in the same process succeeds, and the last one to be
    closed frees it. Where there are no such locks (Windows, some network disks) it does nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._key: tuple[int, int, int] | None = None
        try:
            import fcntl
        except ImportError:
            return
        path = folder / "lock"
        # Asked before the file is opened: closing any handle of it would free our own lock.
        if path.exists() and (held := _held.get(_key_of(path))) is not None:
            held.num_users += 1
            self._key = _key_of(path)
            return
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(file, 300).decode("utf-8", "replace").strip()
            os.close(file)
            _refuse(folder, owner, error)
            return
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()} on {platform.node() or 'unknown'}\n".encode())
        self._key = _key_of(path)
        _held[self._key] = _Held(file)

    def close(self) -> None:
        """Let others write."""
        key, self._key = self._key, None
        if key is None or key[0] != os.getpid():
            return
        held = _held[key]
        held.num_users -= 1
        if held.num_users == 0:
            del _held[key]
            os.close(held.file)

    def __del__(self) -> None:
        self.close()


def check_unlocked(folder: Path) -> None:
    """Refuse a folder that another process writes to."""
    if (folder / "lock").exists():
        FolderLock(folder).close()


def _key_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return os.getpid(), found.st_dev, found.st_ino


def _refuse(folder: Path, owner: str, error: OSError) -> None:
    """Say who holds the lock; only warn where the disk has no locks."""
    if error.errno in NO_LOCKS_HERE:
        logger.warning(
            "the disk of %r has no file locks (%s): nothing keeps a second process from writing "
            "to the same run directory",
            str(folder),
            error.strerror,
        )
        return
    raise RunLogError(
        f"another process (pid {owner or 'unknown'}) writes to {str(folder)!r}; wait until it "
        f"ends or stop it there, or choose another folder"
    ) from error
