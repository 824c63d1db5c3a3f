"""Which rank this process is, and what ranks ask of a machine and a configuration.

No torch here: a command that was started wrongly says so at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moored.errors import MooredError

if TYPE_CHECKING:
    from moored.config import Config

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for every process that it starts."""
MODULE = "-m -- moored"
"""For torchrun, which without the dashes takes `--run` for a short form of its `--run-path`."""
HOW = f"torchrun --nproc-per-node N {MODULE} …"
"""For any command: its own name and words follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of several that run the same command."""

    rank: int
    size: int
    local_rank: int = 0
    """Among the ranks of this machine; the number of its GPU."""
    local_size: int = 1


def started_rank(variables: Mapping[str, str] = os.environ) -> Rank | None:
    """This process as one of the ranks of `torchrun -m -- moored`; None for any other command.

    A `moored` that a script of some other torchrun starts has the variables of that one, so they
    alone do not say it.
    """
    is_module = Path(sys.argv[0]).parts[-2:] == ("moored", "__main__.py")
    if not is_module or any(name not in variables for name in VARIABLES):
        return None
    return rank_from(variables)


def typed_command() -> str:
    """What stands before the name of a command, to start it as this one was started."""
    rank = started_rank()
    if rank is None:
        return "moored"
    ranks = f"--nproc-per-node {rank.size}" if rank.local_size == rank.size else "…"
    return f"torchrun {ranks} {MODULE}"


def kind_here(kind: str | None = None) -> str:
    """The engine for a model, or for that of a run, in a command that does not go on with it.

    What ranks trained is one process's to evaluate, unless ranks were started for that too.
    """
    if kind not in (None, "local", "torchrun"):
        return kind
    return "local" if started_rank() is None else "torchrun"


def refuse_idle_ranks(kind: str) -> None:
    """Raise when torchrun started several ranks of which only one would work."""
    rank = started_rank()
    if rank is not None and rank.size > 1 and kind != "torchrun":
        raise MooredError(
            f"torchrun started {rank.size} ranks, but engine.kind is {kind}, which uses one "
            f"process; set engine.kind=torchrun"
        )


def rank_from(variables: Mapping[str, str] = os.environ) -> Rank:
    """This process among those that torchrun started."""
    missing = [name for name in VARIABLES if name not in variables]
    if missing:
        raise MooredError(
            f"engine.kind=torchrun needs the variables that torchrun sets, and {missing[0]} is "
            f"missing; start the command with {HOW}"
        )
    numbers = {}
    for name in VARIABLES[:4]:
        try:
            numbers[name] = int(variables[name])
        except ValueError:
            raise MooredError(
                f"{name} must be a whole number, got {variables[name]!r}; start with {HOW}"
            ) from None
    rank, size, local_rank, local_size = (numbers[name] for name in VARIABLES[:4])
    if not 0 <= rank < size or not 0 <= local_rank < local_size <= size:
        raise MooredError(
            f"RANK {rank} of WORLD_SIZE {size} and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE "
            f"{local_size} do not fit together; start with {HOW}"
        )
    return Rank(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def ranks_text(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def check_ranks(config: Config, size: int, *, trains: bool = True) -> None:
    """Raise when a configuration cannot be computed by so many ranks."""
    if not trains:
        return
    if size > config.rollout.num_groups:
        raise MooredError(
            f"{size} ranks share {config.rollout.num_groups} groups, so some would have none; set "
            f"rollout.num_groups to {size} or more, or start fewer ranks"
        )
    for name, value, only in (
        ("optimizer.kind", config.optimizer.kind, "adamw"),
        ("optimizer.states", config.optimizer.states, "device"),
        ("engine.compile", config.engine.compile, False),
        ("gradients.every", config.gradients.every, 0),
    ):
        if value != only:
            raise MooredError(
                f"{name} = {value} works with engine.kind=local only; set it to {only}"
            )


def check_gpus(rank: Rank, device: str, num_gpus: int) -> str:
    """The device of a rank; raises when there are fewer GPUs than ranks on this machine."""
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise MooredError(
            f"engine.device = {device} cannot be that of every rank; set it to auto, cuda or cpu"
        )
    if rank.local_size > num_gpus:
        raise MooredError(
            f"{rank.local_size} ranks were started on this machine, which has {num_gpus} GPUs; "
            f"start as many ranks as GPUs (--nproc-per-node), or set engine.device=cpu"
        )
    return f"cuda:{rank.local_rank}"
