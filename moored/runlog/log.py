"""The run directory: `config.yaml`, `metrics.jsonl` and other streams, `rollouts/`, `scores/`.

Streams are append-only JSON lines, one record per line, each with its schema number and step. A
process killed at any moment leaves at most one torn last line, which readers skip and the next
writer removes. Other files are written under another name and renamed when complete.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from moored.errors import RunLogError
from moored.runlog.lock import FolderLock, check_unlocked

SCHEMA = 1
Stream = Literal["metrics", "collapse", "gradients", "timing", "changes", "starts", "events"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
"""Timing is separate, so that a resumed run writes the same metrics as one that never stopped.
Changes holds the options that were changed when the run was resumed after a step, starts the
command, versions and machine of every start, events those of run and engine processes."""
STOPPED_EARLY = 5
"""Exit code of a run that has ended before its last step for a reason of its own, which resuming it
does not change: an end, and no failure."""
NOT_TOLD: tuple[Stream, ...] = ("starts", "events")
"""What may be written before the first step is done."""
MAX_DEPTH = 4
"""Of folders in which runs are looked for: a study has one for each factor, and one for seeds."""


def check_folder(path: str | Path, *, resume: bool = False) -> None:
    """Refuse a folder that cannot become a run directory, or that another process writes to."""
    path = Path(path)
    # A run that was started and never finished a step may be started again.
    told = [stream for stream in STREAMS if stream not in NOT_TOLD]
    if not resume and any((path / f"{stream}.jsonl").exists() for stream in told):
        raise RunLogError(f"{str(path)!r} already holds a run; resume it or give another name")
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "is not writable" if nearest.is_dir() else "is not a folder"
        raise RunLogError(
            f"cannot write to run directory {str(path)!r}: {str(nearest)!r} {why}; "
            f"choose another folder"
        )
    check_unlocked(path)


class RunLog:
    """Writer of one run directory."""

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        check_folder(self.path, resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
            for stream in STREAMS:
                _drop_torn_line(self._file(stream))
        except OSError as error:
            raise RunLogError(
                f"cannot write to run directory {str(self.path)!r}: {error.strerror}"
            ) from error

    def write_config(self, text: str) -> None:
        """Store the resolved configuration."""
        write_atomically(self.path / "config.yaml", text)

    def append(self, stream: Stream, step: int, record: Mapping[str, object]) -> None:
        """Add one record; numbers that are not finite become null."""
        taken = sorted({"schema", "step"} & set(record))
        if taken:
            raise RunLogError(f"a record of {stream} may not hold {taken[0]!r}, the log sets it")
        line = _to_line({"schema": SCHEMA, "step": step, **record})
        _append_whole(self._file(stream), line)

    def rewind(self, step: int) -> tuple[int, float]:
        """Forget everything after `step`: what a resumed run will write again.

        Returns how many steps that were, and their seconds. Events stay: they did happen.
        """
        forgotten: dict[int, float] = {}
        for stream in STREAMS:
            file = self._file(stream)
            if not file.exists() or stream == "events":
                continue
            records = list(_read(file))
            # To -1, only what was measured is forgotten: starts come before any step.
            last = max(step, 0) if stream in ("starts", "changes") else step
            kept = [record for record in records if _step(record) <= last]
            if stream == "timing":
                late = (record for record in records if _step(record) > step)
                forgotten |= {_step(record): _seconds(record) for record in late}
            write_atomically(file, "".join(_to_line(record) for record in kept))
        for folder in (self.path / "rollouts", self.path / "scores"):
            later = [file for file in folder.glob("step_*") if step_of_file(file) > step]
            for file in [*later, *folder.glob(".step_*")]:
                _remove(file)
        return len(forgotten), sum(forgotten.values())

    def rollouts_file(self, step: int) -> Path:
        """Where the groups of a step are stored."""
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def run_id(self) -> str:
        """A name that no other run has, made on first use; trackers know the run by it."""
        file = self.path / "run_id"
        if not file.exists():
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", self.path.resolve().name)
            write_atomically(file, f"{name}-{secrets.token_hex(4)}\n")
        return file.read_text(encoding="utf-8").strip()

    def _file(self, stream: Stream) -> Path:
        return self.path / f"{stream}.jsonl"


def all_done(num_steps: int) -> str:
    """Why a run ended that has done all of its steps."""
    return "the only step is done" if num_steps == 1 else f"all {num_steps} steps done"


def lost_episodes(metrics: Mapping[str, object]) -> int:
    """How many episodes of a step, its evaluation included, ended in an error."""
    counts = (metrics.get(f"{kind}/error_count") for kind in ("rollout", "evaluation"))
    return sum(int(count) for count in counts if isinstance(count, int | float))


def read_records(path: str | Path, stream: Stream = "metrics") -> list[dict[str, object]]:
    """All whole records of a stream, oldest first; none when the run never wrote to it."""
    folder = Path(path)
    file = folder / f"{stream}.jsonl"
    if file.exists():
        return list(_read(file))
    names = ("config.yaml", *(f"{name}.jsonl" for name in STREAMS))
    if any((folder / name).exists() for name in names):
        return []
    raise RunLogError(_not_a_run(folder, file))


def _not_a_run(folder: Path, file: Path) -> str:
    """Why there is nothing to read; a folder of runs, such as a study's, is told apart."""
    for depth in range(1, MAX_DEPTH + 1):
        runs = sorted(found.parent for found in folder.glob("*/" * depth + "config.yaml"))
        if runs:
            such = f"give those, such as {str(runs[0])!r}"
            return f"{str(folder)!r} is not a run but holds runs; {such}"
    return f"{str(file)!r} does not exist; is {str(folder)!r} a run directory?"


def write_atomically(file: Path, text: str) -> None:
    """Replace `file` in one step: readers see the old text or the new, never half of it.

    Devices and pipes are written to as they are: renaming would put a file in their place.
    """
    if is_special(file):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunLogError(f"cannot write {str(file)!r}: {error.strerror or error}") from error
        return
    with replacing(file) as beside:
        beside.write_text(text, encoding="utf-8")


def is_special(file: Path) -> bool:
    """True of a device, pipe or socket, and of /dev/stdout, a link to any file."""
    in_dev = file.parent == Path("/dev")
    return file.exists() and not file.is_dir() and (in_dev or not file.is_file())


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `file` when the block ends without an error."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        yield beside
        with beside.open("rb+") as handle:
            os.fsync(handle.fileno())
        beside.replace(file)
    except OSError as error:
        raise RunLogError(f"cannot write {str(file)!r}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            beside.unlink()


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise RunLogError(f"cannot delete {str(file)!r}: {error.strerror}") from error


def _read(file: Path) -> Iterator[dict[str, object]]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RunLogError(f"{str(file)!r}, line {number} is not JSON: {error}") from error
            schema = record.get("schema") if isinstance(record, dict) else None
            if schema != SCHEMA:
                raise RunLogError(
                    f"{str(file)!r}, line {number} has schema {schema!r}, this version reads "
                    f"{SCHEMA}; read it with the version that wrote it"
                )
            if not isinstance(record.get("step"), int):
                raise RunLogError(f"{str(file)!r}, line {number} has no step")
            yield record


def step_of_file(file: Path) -> int:
    """10 of `step_000010.parquet`; 0 of a file that someone else put there."""
    number = file.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else 0


def _step(record: Mapping[str, object]) -> int:
    step = record["step"]
    assert isinstance(step, int)
    return step


def _seconds(record: Mapping[str, object]) -> float:
    """Of all phases of a timing record; what ran beside them is not counted twice."""
    phases = (v for name, v in record.items() if name.endswith("_s") and "beside" not in name)
    return sum(value for value in phases if isinstance(value, int | float))


def _to_line(record: Mapping[str, object]) -> str:
    return json.dumps(_plain(record), allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: object) -> object:
    """JSON types only: numpy scalars unpacked, numbers that are not finite as null."""
    # Most values, and quicker than to ask which classes they belong to.
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) in (int, str, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _append_whole(file: Path, line: str) -> None:
    """Append all of `line` or nothing: a full disk must not leave half a record behind."""
    data = line.encode("utf-8")
    descriptor = None
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, data)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        if written < len(data):
            os.ftruncate(descriptor, size)
            raise RunLogError(f"cannot append to {str(file)!r}: the disk is full")
    except OSError as error:
        raise RunLogError(f"cannot append to {str(file)!r}: {error.strerror}") from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _drop_torn_line(file: Path) -> None:
    if not file.exists():
        return
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(file, whole)


@contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """An empty folder to write to; it takes the place of `final` when the block ends well.

    A kill at any moment leaves either the old folder or the new one, never a half.
    """
    beside, old = (final.with_name(f".{what}_{final.name}") for what in ("writing", "old"))
    try:
        if old.exists() and not final.exists():
            # A kill between the two renames below.
            old.replace(final)
        # What a kill left behind, of any step.
        for stale in [*final.parent.glob(".writing_*"), old]:
            shutil.rmtree(stale, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for weights in beside.rglob("*.safetensors"):
            with suppress(OSError):  # some network disks refuse it, and all is written
                # As other new files are: safetensors 0.8 keeps its own to their owner.
                weights.chmod(beside.stat().st_mode & 0o666)
        if final.exists():
            final.replace(old)
        beside.replace(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        why = getattr(error, "strerror", None) or error
        raise RunLogError(f"cannot write {str(final)!r}: {why}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
