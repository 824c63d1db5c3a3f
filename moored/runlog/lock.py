"""One writer at a time: `RUN/lock` is locked as long as a process writes to the run directory.

The operating system frees the lock when the process ends, even after a crash, so none is left over.
"""

from __future__ import annotations

import os
from pathlib import Path

from moored.errors import RunLogError


class FolderLock:
    """The lock of a run directory, held until it is closed or forgotten.

    It belongs to the process: taking it again in the same process succeeds. On systems without
    such locks (Windows) it does nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        try:
            import fcntl
        except ImportError:
            return
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.read(self._file, 20).decode("ascii", "replace").strip()
            raise RunLogError(
                f"another process (pid {owner or 'unknown'}) writes to {str(folder)!r}; wait until "
                f"it ends, or stop it first"
            ) from error
        os.ftruncate(self._file, 0)
        os.write(self._file, b"%d\n" % os.getpid())

    def close(self) -> None:
        """Let others write."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.close()
