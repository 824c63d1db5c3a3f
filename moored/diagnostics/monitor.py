"""The collapse monitor: what a training loop calls every few steps.

Ten lines in anyone's loop: make it with a `ScoreFn`, hand it the groups of a step before filtering,
log what it returns, save its state with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from moored.diagnostics.alarm import Alarm, CollapseAlarm
from moored.diagnostics.chain import action_information, reasoning_action_information
from moored.diagnostics.information import information
from moored.diagnostics.pairs import (
    PairSet,
    first_turn_pairs,
    trajectory_pairs,
    turn_position_pairs,
)
from moored.diagnostics.regimes import Regime, RegimeTracker
from moored.diagnostics.report import CollapseReport, ZScoreEMA
from moored.diagnostics.scoring import ScoreFn, cross_score
from moored.errors import TooFewPromptsError
from moored.names import check_name
from moored.types import Group, Prompt, Turn

View = Literal["first_turn", "trajectory", "positions", "chain"]
PREFIXES = {
    "first_turn": "collapse_first_turn_sample",
    "trajectory": "collapse_trajectory_sample",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One look at a run."""

    step: int
    metrics: Mapping[str, float]
    """Numbers for the log; a view that could not be measured is missing here and in `skipped`."""
    reports: Mapping[str, CollapseReport]
    """By view: first_turn, trajectory, turn_1, turn_2, …"""
    skipped: Mapping[str, str]
    """View -> why it could not be measured."""
    regime: Regime | None
    alarm: Alarm | None
    """Set in the step in which the alarm goes off."""


@dataclass(slots=True, kw_only=True)
class CollapseMonitor:
    """Measures input dependence, follows regime and alarm over a run."""

    score: ScoreFn
    views: Sequence[View] = ("first_turn", "trajectory")
    num_pairs: int = 64
    num_prompts: int | None = None
    """Prompts of the first-turn view; fix it, so that curves can be compared."""
    bootstrap: int = 0
    permutations: int = 0
    ema_decay: float = 0.9
    seed: int = 0
    chain_rollouts: int = 4
    """Trajectories a prompt in the chain view: it scores their square."""
    alarm: CollapseAlarm = field(default_factory=CollapseAlarm)
    regimes: RegimeTracker = field(default_factory=RegimeTracker)
    _emas: dict[str, ZScoreEMA] = field(default_factory=dict)
    _watched: str | None = None
    """The view that regime and alarm follow; one series, never two mixed."""

    def __post_init__(self) -> None:
        for view in self.views:
            check_name("view", view, get_args(View))

    def measure(self, step: int, groups: Sequence[Group]) -> Measurement:
        """Measure all views on one step's groups."""
        metrics = {"collapse/valid_thinking_rate": _valid_thinking_rate(groups)}
        reports: dict[str, CollapseReport] = {}
        skipped: dict[str, str] = {}
        for name, draw in self._draws(step, groups).items():
            try:
                reports[name] = self._report(name, draw(), step)
            except TooFewPromptsError as error:
                skipped[name] = str(error)
                continue
            metrics |= reports[name].metrics(PREFIXES.get(name, f"collapse_{name}"))
        if "chain" in self.views:
            self._measure_chain(groups, metrics, skipped)
        regime, alarm = self._judge(step, reports)
        metrics["collapse/num_skipped_views"] = float(len(skipped))
        return Measurement(
            step=step,
            metrics=metrics,
            reports=reports,
            skipped=skipped,
            regime=regime,
            alarm=alarm,
        )

    def _draws(self, step: int, groups: Sequence[Group]):
        """View name -> function that draws its pairs."""
        common = {"num_pairs": self.num_pairs, "seed": self._seed(step)}
        draws = {}
        if "first_turn" in self.views:
            draws["first_turn"] = lambda: first_turn_pairs(
                groups, num_prompts=self.num_prompts, **common
            )
        if "trajectory" in self.views:
            draws["trajectory"] = lambda: trajectory_pairs(groups, **common)
        if "positions" in self.views:
            longest = max((t.num_turns for g in groups for t in g.trajectories), default=0)
            for position in range(longest):
                draws[f"turn_{position + 1}"] = lambda position=position: turn_position_pairs(
                    groups, position, **common
                )
        return draws

    def _report(self, name: str, pairs: PairSet, step: int) -> CollapseReport:
        report = information(
            cross_score(pairs, self.score),
            pairs.columns,
            pairs.lengths,
            bootstrap=self.bootstrap,
            permutations=self.permutations,
            seed=self._seed(step),
        )
        return self._emas.setdefault(name, ZScoreEMA(self.ema_decay)).update(report)

    def _judge(
        self, step: int, reports: Mapping[str, CollapseReport]
    ) -> tuple[Regime | None, Alarm | None]:
        """Regime and alarm follow the first view of the run that could be measured."""
        if self._watched is None:
            self._watched = next((view for view in PREFIXES if view in reports), None)
        report = reports.get(self._watched or "")
        if report is None:
            return None, None
        alarm = self.alarm.update(step, report.mi_estimate, report.conditional_entropy_est)
        return self.regimes.update(report), alarm

    def _measure_chain(
        self, groups: Sequence[Group], metrics: dict[str, float], skipped: dict[str, str]
    ) -> None:
        """I(X;A) and I(Z;A|X) of the first turns."""
        first = [[t.turns[0] for t in group.trajectories if t.turns] for group in groups]
        acted = [turn for turns in first for turn in turns if len(turn.action_ids)]
        try:
            report = action_information(
                [_prompt(turn).key for turn in acted],
                [tuple(turn.action_ids.tolist()) for turn in acted],
            )
            metrics["collapse_chain/state_action_mi"] = report.mi_corrected_nats
        except TooFewPromptsError as error:
            skipped["state_action"] = str(error)
        full = [[t for t in turns if len(t.reasoning_ids) and len(t.action_ids)] for turns in first]
        used = [turns[: self.chain_rollouts] for turns in full if turns]
        try:
            chain = reasoning_action_information(
                [self._chain_block(turns) for turns in used],
                reasoning_keys=[[turn.reasoning_ids.tobytes() for turn in turns] for turns in used],
            )
            metrics["collapse_chain/reasoning_action_mi"] = chain.mi_nats
        except TooFewPromptsError as error:
            skipped["reasoning_action"] = str(error)

    def _chain_block(self, turns: Sequence[Turn]) -> np.ndarray:
        """(K, K) scores: action k after the reasoning of turn l."""
        actions = [turn.action_ids for turn in turns]
        columns = [self.score(_prompt(turn, up_to_action=True), actions) for turn in turns]
        return np.array([[float(np.sum(x)) for x in column] for column in columns]).T

    def _seed(self, step: int) -> int:
        return int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain JSON."""
        return {
            "alarm": self.alarm.state_dict(),
            "regimes": self.regimes.state_dict(),
            "emas": {name: ema.state_dict() for name, ema in self._emas.items()},
            "watched": self._watched,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.alarm.load_state_dict(state["alarm"])
        self.regimes.load_state_dict(state["regimes"])
        self._emas = {}
        for name, saved in state["emas"].items():
            self._emas[name] = ZScoreEMA(self.ema_decay)
            self._emas[name].load_state_dict(saved)
        self._watched = state["watched"]


def _valid_thinking_rate(groups: Sequence[Group]) -> float:
    """Share of first turns that hold a reasoning; logged even when no view could be measured."""
    first = [t.turns[0] for group in groups for t in group.trajectories if t.turns]
    return sum(len(turn.reasoning_ids) > 0 for turn in first) / max(len(first), 1)


def _prompt(turn: Turn, *, up_to_action: bool = False) -> Prompt:
    """What a first turn answered; `up_to_action` adds its reply up to the action."""
    if not up_to_action or turn.answer_span is None:
        return turn.prompt
    return turn.prompt.then(turn.completion_ids[: turn.answer_span[0]])
