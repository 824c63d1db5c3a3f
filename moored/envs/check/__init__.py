"""`check_env`: does an environment keep its contract? With a remedy for every failure."""

from moored.envs.check.runner import CheckReport, check_env

__all__ = ["CheckReport", "check_env"]
