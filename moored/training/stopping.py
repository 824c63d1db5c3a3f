"""What the loop counts: when a run ends early, and when it is told what its updates consist of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moored.algo.snr import FIRST_STEPS, FREE_ABOVE
from moored.config import Config
from moored.diagnostics.alarm import Alarm

FEW_VALID = 0.1
"""Share of well-formed turns below which the form is what a model has to learn first."""


@dataclass(slots=True)
class LoopState:
    """What the loop itself remembers; saved with every checkpoint."""

    empty_steps: int = 0
    validity: float = 1.0
    """Share of well-formed turns in the last step."""
    has_only_errors: bool = False
    """Every episode of the last step ended in an error."""
    first_variances: list[float] = field(default_factory=list)
    first_shares: list[float] = field(default_factory=list)
    """Outcome-free shares of the first steps that trained on anything."""
    low_variance_steps: int = 0
    low_evaluations: int = 0
    alarm_step: int | None = None
    """When the collapse alarm went off first."""


def take_step(
    config: Config, state: LoopState, metrics: Mapping[str, float], alarm: Alarm | None = None
) -> None:
    """Count a step in `state`; `alarm` is the first of the run so far."""
    state.alarm_step = None if alarm is None else alarm.step
    state.empty_steps = state.empty_steps + 1 if metrics["update/is_empty"] else 0
    state.validity = metrics["rollout/validity_rate"]
    state.has_only_errors = math.isnan(metrics.get("rollout/success_rate", 0.0))
    variance = metrics["rollout/reward_variance_mean"]
    if not math.isnan(variance):  # where episodes were lost, there is none, not a low one
        _take_variance(config, state, variance)
    share = metrics.get("signal/outcome_free_share", math.nan)
    if not math.isnan(share) and len(state.first_shares) < FIRST_STEPS:
        state.first_shares.append(share)
    success = metrics.get("evaluation/success_rate", math.nan)
    if not math.isnan(success):  # where every episode was lost, nothing was measured
        is_low = success < config.stop.min_success[0]
        state.low_evaluations = state.low_evaluations + 1 if is_low else 0


def _take_variance(config: Config, state: LoopState, variance: float) -> None:
    if len(state.first_variances) < 10:
        state.first_variances.append(variance)
        return
    floor = config.stop.low_variance[0] * float(np.mean(state.first_variances))
    state.low_variance_steps = state.low_variance_steps + 1 if variance < floor else 0


def stop_reason(config: Config, state: LoopState) -> str:
    """Why the run should end now; empty to go on.

    It depends on nothing but the state, which is saved: a run that has ended is not taken further
    by resuming it, unless its options are changed.
    """
    if state.empty_steps >= config.filter.max_empty_steps:
        steps = "1 step" if state.empty_steps == 1 else f"{state.empty_steps} steps in a row"
        return f"{steps} had no group with reward variance to train on: {_remedy(state)}"
    share, patience = config.stop.low_variance
    if share and state.low_variance_steps >= patience:
        return (
            f"reward variance stayed below {share:.0%} of its start for "
            f"{state.low_variance_steps} steps"
        )
    rate, patience = config.stop.min_success
    if rate and state.low_evaluations >= patience:
        return f"validation success stayed below {rate:.0%} for {state.low_evaluations} evaluations"
    if config.stop.alarm and state.alarm_step is not None:
        return (
            f"the collapse alarm went off at step {state.alarm_step}: moored diagnose RUN shows "
            f"the fall, and stop.alarm=false goes on regardless"
        )
    return ""


def _remedy(state: LoopState) -> str:
    """What to do where all rewards of a group are equal, or missing."""
    if state.has_only_errors:
        return "every episode of the last one ended in an error; the warnings of the run say which"
    if state.validity < FEW_VALID:
        return (
            f"{state.validity:.0%} of the turns were well-formed; teach the model the form first "
            f"(moored sft), or take one that follows instructions"
        )
    return "take easier tasks, larger groups or a finer reward; moored advise RUN shows the groups"


def outcome_free_warning(config: Config, state: LoopState) -> str:
    """What to say of updates that are mostly about something else than the outcome, else nothing.

    Only where leaving out the division or filtering would change it: advantages are divided by the
    group's std, nothing is filtered, and some group held both a success and a failure.
    """
    share = float(np.mean(state.first_shares or [0.0]))
    is_open = config.algorithm.divides_by_std and config.filter.rule == "none"
    if len(state.first_shares) < FIRST_STEPS or not is_open or not FREE_ABOVE < share < 1.0:
        return ""
    return (
        f"{share:.0%} of the push of the first {FIRST_STEPS} updates came from groups that held no "
        f"success, or no failure: divided by the std of their rewards, small differences push as "
        f"hard as an outcome, which may loosen reasoning from its prompt. Start again with "
        f"algorithm.advantage=dr_grpo, which does not divide, or go on with filter.rule=top_p"
    )
