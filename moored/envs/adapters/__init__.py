"""Environments of other packages, played through moored's protocol."""

from moored.envs.adapters.gymnasium import GymnasiumEnv
from moored.envs.adapters.openenv import OpenEnv
from moored.envs.adapters.reasoning_gym import ReasoningGym
from moored.envs.adapters.remote import Remote
from moored.envs.adapters.textarena import TextArena
from moored.envs.adapters.textworld import TextWorld
from moored.envs.adapters.verifiers import Verifiers

__all__ = [
    "GymnasiumEnv",
    "OpenEnv",
    "ReasoningGym",
    "Remote",
    "TextArena",
    "TextWorld",
    "Verifiers",
]
