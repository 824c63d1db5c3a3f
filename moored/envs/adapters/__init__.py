"""Environments of other packages, played through moored's protocol."""

from moored.envs.adapters.gymnasium import GymnasiumEnv
from moored.envs.adapters.reasoning_gym import ReasoningGym

__all__ = ["GymnasiumEnv", "ReasoningGym"]
