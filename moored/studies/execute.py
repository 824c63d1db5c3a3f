"""Runs of a study as processes of `moored train`, several at a time, here or on a cluster.

A run that was begun is resumed. A run that fails does not stop the others. A process whose parent
is killed gets SIGTERM (on Linux), finishes its step and saves; a study that is started again waits
for such processes before it resumes their runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from moored.errors import RunLogError
from moored.runlog.lock import check_unlocked
from moored.runlog.log import STOPPED_EARLY
from moored.studies.declaration import PlannedRun
from moored.studies.folder import StudyFolder, changes_of

POLL_S = 0.1
KILL_AFTER_S = 60.0
"""How long a child may take to stop at once before it is killed."""
PR_SET_PDEATHSIG = 1
ENTRY = "from moored.cli.main import main; main()"

What = Literal["started", "resumed", "finished", "failed", "stopped", "waits"]
OnEvent = Callable[[PlannedRun, What, str], None]
"""Is told of a change in the state of a run, with details where there are any."""


class RunProcess(Protocol):
    """A `moored train` that was started, as `subprocess.Popen` has it."""

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[[Sequence[str], Path], RunProcess]
"""Starts `moored` with these words; what it prints is appended to the file."""


@dataclass(slots=True)
class _Child:
    run: PlannedRun
    process: RunProcess
    started_s: float
    is_told_to_stop: bool = False

    def stop(self) -> None:
        self.is_told_to_stop = True
        self.process.send_signal(signal.SIGTERM)


def run_all(
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    *,
    jobs: int,
    launch: Launch,
    on_event: OnEvent,
    on_poll: Callable[[Sequence[PlannedRun]], None],
    is_stopped: Callable[[], bool],
) -> None:
    """Run all that are given, in order; returns when all have ended or those begun have stopped.

    `on_poll` is called several times a second with the runs that are under way.
    """
    waiting, children, busy = list(runs), list[_Child](), set[str]()
    try:
        while waiting or children:
            if is_stopped():
                waiting.clear()
                for child in children:
                    if not child.is_told_to_stop:
                        child.stop()
            while len(children) < jobs:
                child = _start_next(folder, waiting, busy, launch, on_event)
                if child is None:
                    break
                children.append(child)
            for child in list(children):
                if (code := child.process.poll()) is not None:
                    children.remove(child)
                    _note_end(folder, child, code, on_event)
            on_poll([child.run for child in children])
            time.sleep(POLL_S)
    except BaseException:
        _stop_at_once(children)
        raise


def _start_next(
    folder: StudyFolder,
    waiting: list[PlannedRun],
    busy: set[str],
    launch: Launch,
    on_event: OnEvent,
) -> _Child | None:
    """Start the first run that nobody writes to; a child of a killed study may be stopping."""
    for run in waiting:
        try:
            check_unlocked(folder.run_folder(run))
        except RunLogError as error:
            if run.name not in busy:
                busy.add(run.name)
                on_event(run, "waits", str(error).partition(";")[0])
            continue
        waiting.remove(run)
        words = train_command(folder, run)
        process = launch(words, folder.log_file(run))
        on_event(run, "resumed" if "--resume" in words else "started", "")
        return _Child(run, process, time.monotonic())
    return None


def train_command(folder: StudyFolder, run: PlannedRun) -> list[str]:
    """The words after `moored`. The study is reported on as a whole, not each run (5 MB)."""
    path = folder.run_folder(run)
    if (path / "config.yaml").is_file():
        changes = changes_of(path, run).items()  # only paths of files that were moved
        moved = [f"{name}={json.dumps(change.new)}" for name, change in changes]
        return ["train", "--no-report", "--resume", str(path), *moved]
    return ["train", "--no-report", *run.words, "--run", str(path)]


def launch_here(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A child of this process, which gets SIGTERM when this process is killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    with log.open("ab") as output:
        return subprocess.Popen(
            # -P: a file in the current folder must not hide a module.
            [sys.executable, "-P", "-c", ENTRY, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            # Ctrl-C reaches the whole group of a terminal; the study passes it on, once.
            start_new_session=True,
            preexec_fn=libc and (lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)),
        )


def _note_end(folder: StudyFolder, child: _Child, code: int, on_event: OnEvent) -> None:
    seconds = time.monotonic() - child.started_s
    is_finished = code in (0, STOPPED_EARLY)
    if child.is_told_to_stop and not is_finished:
        on_event(child.run, "stopped", "")
        return
    folder.note_end(child.run, code, seconds)
    if is_finished:
        early = "" if code == 0 else ", stopped early by itself"
        on_event(child.run, "finished", f"in {seconds:.0f} s{early}")
        return
    on_event(child.run, "failed", failure(folder, child.run))


def failure(folder: StudyFolder, run: PlannedRun) -> str:
    """Why a run failed: the last line it printed, and where the rest is."""
    log = folder.log_file(run)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"exit code {folder.ended[run.name].exit_code}: {last} (log: {log})"


def _stop_at_once(children: Sequence[_Child]) -> None:
    """A second signal makes `moored train` stop in the middle of its step."""
    for child in children:
        if not child.is_told_to_stop:
            child.stop()
            time.sleep(POLL_S)
        child.stop()
    deadline = time.monotonic() + KILL_AFTER_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
