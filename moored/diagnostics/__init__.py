"""Is reasoning still tied to its input? Numpy only; a model arrives as a `ScoreFn`."""

from moored.diagnostics.chain import action_information, reasoning_action_information
from moored.diagnostics.information import information
from moored.diagnostics.pairs import (
    PairSet,
    ScoreFn,
    cross_score,
    first_turn_pairs,
    trajectory_pairs,
    turn_pairs,
    turn_position_pairs,
)
from moored.diagnostics.report import CollapseReport, Interval, Regime, RegimeThresholds, classify
from moored.diagnostics.swap import SwapSet, observation_swap_pairs
from moored.diagnostics.watch import (
    Alarm,
    CollapseAlarm,
    CollapseWatch,
    RegimeTracker,
    Watched,
    ZScoreEMA,
    find_alarm,
)

__all__ = [
    "Alarm",
    "CollapseAlarm",
    "CollapseReport",
    "CollapseWatch",
    "Interval",
    "PairSet",
    "Regime",
    "RegimeThresholds",
    "RegimeTracker",
    "ScoreFn",
    "SwapSet",
    "Watched",
    "ZScoreEMA",
    "action_information",
    "classify",
    "cross_score",
    "find_alarm",
    "first_turn_pairs",
    "information",
    "observation_swap_pairs",
    "reasoning_action_information",
    "trajectory_pairs",
    "turn_pairs",
    "turn_position_pairs",
]
