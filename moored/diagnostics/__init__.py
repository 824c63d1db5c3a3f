"""Is reasoning still tied to its input? Numpy only; a model arrives as a `ScoreFn`."""

from moored.diagnostics.actions import action_information
from moored.diagnostics.alarm import Alarm, CollapseAlarm, find_alarm
from moored.diagnostics.chain import reasoning_action_information
from moored.diagnostics.information import information
from moored.diagnostics.level import Level, pool
from moored.diagnostics.pairs import (
    PairSet,
    ScoreFn,
    cross_score,
    first_turn_pairs,
    trajectory_pairs,
    turn_pairs,
    turn_position_pairs,
)
from moored.diagnostics.report import CollapseReport, Interval, Regime, Verdict
from moored.diagnostics.swap import SwapSet, episode_swap_pairs, observation_swap_pairs
from moored.diagnostics.verdict import Judgement, Thresholds, judge, judge_series
from moored.diagnostics.watch import CollapseWatch, VerdictTracker, Watched, ZScoreEMA
from moored.diagnostics.worth import Worth, gain_reward_correlation

__all__ = [
    "Alarm",
    "CollapseAlarm",
    "CollapseReport",
    "CollapseWatch",
    "Interval",
    "Judgement",
    "Level",
    "PairSet",
    "Regime",
    "ScoreFn",
    "SwapSet",
    "Thresholds",
    "Verdict",
    "VerdictTracker",
    "Watched",
    "Worth",
    "ZScoreEMA",
    "action_information",
    "cross_score",
    "episode_swap_pairs",
    "find_alarm",
    "first_turn_pairs",
    "gain_reward_correlation",
    "information",
    "judge",
    "judge_series",
    "observation_swap_pairs",
    "pool",
    "reasoning_action_information",
    "trajectory_pairs",
    "turn_pairs",
    "turn_position_pairs",
]
