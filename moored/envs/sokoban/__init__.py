"""Sokoban: push every box onto a target."""

from moored.envs.sokoban.env import Sokoban

__all__ = ["Sokoban"]
