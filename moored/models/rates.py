"""Learning rates that follow the size of the model, where the configuration sets none.

The paper's rates are for models of billions of parameters. With them an embedded model does not
change within hundreds of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from moored.config import Config
from moored.config_engine import OptimizerConfig
from moored.models.find import weights_folder

SMALL_MODEL_PARAMETERS = 50_000_000
"""A model below this size is small: `nano` has 1.2 million, `mini` 5.4, SmolLM2 135."""
SMOLLM_PARAMETERS = 134_515_008


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of policy and critic."""

    lr: float
    critic_lr: float


SMALL = Rates(lr=1e-4, critic_lr=3e-4)
"""Those of docs/results/collapse.md."""
LARGE = Rates(lr=1e-6, critic_lr=1e-5)
"""RAGEN-2's."""


def rates_of(optimizer: OptimizerConfig, num_parameters: int | None) -> Rates:
    """The rates that are set, and where none is, those for the size; None is a large model."""
    is_small = num_parameters is not None and num_parameters < SMALL_MODEL_PARAMETERS
    default = SMALL if is_small else LARGE
    return Rates(
        lr=default.lr if optimizer.lr is None else optimizer.lr,
        critic_lr=default.critic_lr if optimizer.critic_lr is None else optimizer.critic_lr,
    )


def with_rates(config: Config) -> Config:
    """The configuration with numbers for its learning rates; reads only the header of weights."""
    rates = rates_of(config.optimizer, count_parameters(config.model))
    update = {"lr": rates.lr, "critic_lr": rates.critic_lr}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=update)})


def count_parameters(model: str) -> int | None:
    """Parameters of an embedded model or a folder; None for a hub id, or what cannot be read."""
    if model == "smollm2":
        return SMOLLM_PARAMETERS
    folder = weights_folder(model)
    counts = [_count_in(file) for file in sorted(folder.glob("*.safetensors"))]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _count_in(file: Path) -> int | None:
    """Numbers in a safetensors file; None when it is damaged (loading it says how)."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return None
    try:
        with safe_open(file, framework="np") as opened:
            names = sorted(opened.keys())
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError):
        return None
