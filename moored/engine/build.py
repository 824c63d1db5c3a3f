"""From a configuration to an `Engine`. Nothing heavy is imported until an engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from moored.engine.workers.ranks import kind_here, refuse_idle_ranks
from moored.errors import require_packages
from moored.names import ENGINES, check_name

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


def load_scorer(
    model: str,
    device: str = "auto",
    dtype: str = "auto",
    temperature: float = 1.0,
    *,
    lora: Mapping[str, object] | None = None,
    weights: Path | None = None,
) -> Any:
    """An engine that only scores, checked against the model's own code.

    `weights` is a checkpoint of a run, whose weights take the place of the model's; a run with LoRA
    needs its options.
    """
    from moored.config import Config

    check_name("dtype", dtype, ("auto", "float32", "bfloat16"))
    where = {"kind": kind_here(), "device": device, "dtype": dtype}
    rollout, optimizer = {"temperature": temperature}, dict(lora or {})
    options = {"model": model, "engine": where, "rollout": rollout, "optimizer": optimizer}
    engine: Any = build_engine(Config.model_validate(options), trains=False)
    engine.check_scores()
    if weights is not None:
        engine.learner.load(weights, policy_only=True)
    return engine
