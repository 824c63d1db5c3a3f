"""From a configuration to an `Engine`. Nothing heavy is imported until an engine is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from moored.engine.workers.ranks import refuse_idle_ranks
from moored.errors import require_packages
from moored.names import ENGINES

if TYPE_CHECKING:
    from moored.config import Config
    from moored.engine.base import Engine


class MakeEngine(Protocol):
    """What `engine.kind` names: a class or function that makes an engine."""

    def __call__(self, config: Config, *, trains: bool) -> Engine: ...


def require_run_packages(config: Config) -> None:
    """Refuse a run whose packages are missing; asked before torch is imported, for seconds."""
    require_engine_packages(config)
    if config.log.rollouts_every:
        require_packages("storing rollouts (log.rollouts_every)", ("pyarrow",))


def require_engine_packages(config: Config) -> None:
    if config.engine.kind in ("local", "torchrun"):
        require_packages("a model in this process", ("torch", "transformers", "safetensors"))
    if config.optimizer.lora_rank:
        require_packages("optimizer.lora_rank", ("peft",))


def build_engine(config: Config, *, trains: bool = True) -> Engine:
    """The engine of a run; `trains=False` leaves out what only updates need, e.g. a critic."""
    refuse_idle_ranks(config.engine.kind)
    require_engine_packages(config)
    make = cast(MakeEngine, ENGINES.get_object(config.engine.kind))
    return make(config, trains=trains)
