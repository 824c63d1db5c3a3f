"""Environments by name. Each is imported on first use."""

from __future__ import annotations

from moored.envs.base import Environment, Resource, StepResult
from moored.names import Registry
from moored.reply import Reply, format_reply, parse_actions, parse_reply

ENVIRONMENTS = Registry(
    "environment",
    {
        "sokoban": "moored.envs.sokoban.env:Sokoban",
        "frozen_lake": "moored.envs.frozen_lake:FrozenLake",
        "countdown": "moored.envs.countdown:Countdown",
        "metamath": "moored.envs.math.metamath:MetaMath",
        "bandit": "moored.envs.bandit:Bandit",
        "sudoku": "moored.envs.sudoku:Sudoku",
        "2048": "moored.envs.game2048:Game2048",
        "rubik": "moored.envs.rubik:Rubik",
        "search": "moored.envs.search.env:Search",
        "webshop": "moored.envs.webshop.env:WebShop",
        "code": "moored.envs.code.env:Code",
        "gymnasium": "moored.envs.adapters.gymnasium:GymnasiumEnv",
        "reasoning_gym": "moored.envs.adapters.reasoning_gym:ReasoningGym",
        "textarena": "moored.envs.adapters.textarena:TextArena",
        "textworld": "moored.envs.adapters.textworld:TextWorld",
        "lean": "moored.envs.lean.env:Lean",
        "remote": "moored.envs.adapters.remote:Remote",
        "openenv": "moored.envs.adapters.openenv:OpenEnv",
        "verifiers": "moored.envs.adapters.verifiers:Verifiers",
    },
)

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "Reply",
    "Resource",
    "StepResult",
    "format_reply",
    "parse_actions",
    "parse_reply",
]
