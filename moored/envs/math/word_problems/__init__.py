"""An endless supply of word problems: a family is a function `(rng, level) -> Problem`."""

from __future__ import annotations

from moored.envs.math.word_problems.families import FAMILIES, LEVELS, make_problem
from moored.envs.math.word_problems.problem import Problem

__all__ = ["FAMILIES", "LEVELS", "Problem", "make_problem"]
