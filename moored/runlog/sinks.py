"""Where the numbers of a run go besides its own directory: W&B, TensorBoard, trackio.

A sink is a copy for display. When it fails, the run warns once and goes on; a resumed run continues
the same curves.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from moored.errors import ConfigError
from moored.runlog.log import RunLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a sink knows about the run when it opens."""

    log: RunLog
    project: str
    config: Mapping[str, object]
    first_step: int
    """The next step; what was sent for it and later ones before a resume is void."""


class Sink(Protocol):
    """Takes the numbers of each step; opened by calling its class with a `RunInfo`."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WandbSink:
    """Weights & Biases; `WANDB_MODE=offline` keeps everything under `RUN/wandb`."""

    def __init__(self, info: RunInfo) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=info.project,
            name=info.log.path.resolve().name,
            id=info.log.run_id(),
            resume="allow",
            dir=info.log.path,
            config=dict(info.config),
            allow_val_change=True,  # a resume may come with other options
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # W&B cannot delete points: steps that are repeated after a resume are there already.
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """TensorBoard event files under `RUN/tensorboard`."""

    def __init__(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(info.log.path / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=info.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """trackio, in its local database or where its environment variables point."""

    def __init__(self, info: RunInfo) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=info.project,
            name=info.log.run_id(),
            resume="allow",
            config=dict(info.config),
        )
        # trackio has no public name for the step after the last that it has of the run.
        self._next_step = getattr(self._run, "_next_step", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # It keeps both where a step is sent twice: those repeated after a resume, or after a worker
        # was lost, are there already.
        if step >= self._next_step:
            self._run.log(dict(values), step=step)
            self._next_step = step + 1

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[RunInfo], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorboardSink,
    "trackio": TrackioSink,
}


def require_sinks(names: Iterable[str]) -> None:
    """Refuse sinks whose package, which has the sink's name, is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"log.sinks has {name!r}, but it cannot be imported ({error}); "
                f"run: pip install 'moored[{name}]', or leave it out of log.sinks"
            ) from error


class Sinks:
    """All sinks of a run; a failing one gives one warning and never stops the run."""

    def __init__(self) -> None:
        self._open: dict[str, Sink] = {}
        self._warned: set[str] = set()

    def open(self, names: Iterable[str], info: RunInfo) -> None:
        """Begin, or go on with, the run's curves."""
        for name in names:
            with self._survive(name):
                self._open[name] = SINKS[name](info)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        for name, sink in self._open.items():
            with self._survive(name):
                sink.log(step, values)

    def close(self) -> None:
        """Send what is left."""
        for name, sink in self._open.items():
            with self._survive(name):
                sink.close()
        self._open.clear()

    @contextmanager
    def _survive(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._warned:
                what = "%s failed; the run goes on, and its own files hold every number: %s: %s"
                logger.warning(what, name, type(error).__name__, error)
            self._warned.add(name)
