"""The collapse monitor: what a training loop calls every few steps.

It takes ten lines in any training loop: make it with a `ScoreFn`, give it the groups of a step
before filtering, log what it returns, save its state with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from moored.diagnostics.chain import action_information, reasoning_action_information
from moored.diagnostics.information import PERMUTATIONS, information
from moored.diagnostics.pairs import (
    PairSet,
    ScoreFn,
    cross_score,
    first_turn_pairs,
    trajectory_pairs,
    turn_position_pairs,
)
from moored.diagnostics.report import CollapseReport, Regime
from moored.diagnostics.watch import Alarm, CollapseWatch, Watched
from moored.errors import TooFewPromptsError
from moored.names import check_name
from moored.types import Group, Prompt, ScoreRequest, Turn

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
    permutations: int = PERMUTATIONS
    ema_decay: float = 0.9
    seed: int = 0
    chain_rollouts: int = 4
    """Trajectories per prompt in the chain view: it scores their square."""
    _watches: dict[str, CollapseWatch] = field(default_factory=dict)
    _followed: str | None = None
    """The view that gives regime and alarm: the first of the run that could be measured. It never
    changes later, because two series must not be mixed."""

    def __post_init__(self) -> None:
        for view in self.views:
            check_name("view", view, get_args(View))

    @property
    def alarm(self) -> Alarm | None:
        """The first alarm of the run."""
        return None if self._followed is None else self._watches[self._followed].alarm

    def measure(self, step: int, groups: Sequence[Group]) -> Measurement:
        """Measure all views on one step's groups."""
        metrics = {"collapse/valid_thinking_rate": _valid_thinking_rate(groups)}
        watched: dict[str, Watched] = {}
        skipped: dict[str, str] = {}
        for name, draw in self._draws(step, groups).items():
            try:
                watched[name] = self._look(name, draw(), step)
            except TooFewPromptsError as error:
                skipped[name] = str(error)
                continue
            metrics |= watched[name].report.metrics(PREFIXES.get(name, f"collapse_{name}"))
        if "chain" in self.views:
            self._measure_chain(groups, metrics, skipped)
        if self._followed is None:
            self._followed = next((view for view in PREFIXES if view in watched), None)
        followed = watched.get(self._followed or "")
        metrics["collapse/num_skipped_views"] = float(len(skipped))
        return Measurement(
            step=step,
            metrics=metrics,
            reports={name: each.report for name, each in watched.items()},
            skipped=skipped,
            regime=None if followed is None else followed.regime,
            alarm=None if followed is None else followed.alarm,
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

    def _look(self, name: str, pairs: PairSet, step: int) -> Watched:
        report = information(
            cross_score(pairs, self.score),
            pairs.columns,
            pairs.lengths,
            bootstrap=self.bootstrap,
            permutations=self.permutations,
            seed=self._seed(step),
        )
        return self._watch(name).update(step, report)

    def _watch(self, name: str) -> CollapseWatch:
        return self._watches.setdefault(name, CollapseWatch(ema_decay=self.ema_decay))

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
                self._chain_blocks(used),
                reasoning_keys=[[turn.reasoning_ids.tobytes() for turn in turns] for turns in used],
            )
            metrics["collapse_chain/reasoning_action_mi"] = chain.mi_nats
        except TooFewPromptsError as error:
            skipped["reasoning_action"] = str(error)

    def _chain_blocks(self, groups: Sequence[Sequence[Turn]]) -> list[np.ndarray]:
        """(K, K) scores of each group: action k after the reasoning of turn l."""
        requests = [
            ScoreRequest(_prompt(turn, up_to_action=True), [other.action_ids for other in turns])
            for turns in groups
            for turn in turns
        ]
        columns = iter(self.score(requests) if requests else ())
        return [
            np.array([[float(np.sum(x)) for x in next(columns)] for _ in turns]).T
            for turns in groups
        ]

    def _seed(self, step: int) -> int:
        return int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain JSON."""
        return {
            "watches": {name: watch.state_dict() for name, watch in self._watches.items()},
            "followed": self._followed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watches = {}
        for name, saved in state["watches"].items():
            self._watch(name).load_state_dict(saved)
        self._followed = state["followed"]


def _valid_thinking_rate(groups: Sequence[Group]) -> float:
    """Share of first turns that hold a reasoning; logged even when no view could be measured."""
    first = [t.turns[0] for group in groups for t in group.trajectories if t.turns]
    return sum(len(turn.reasoning_ids) > 0 for turn in first) / max(len(first), 1)


def _prompt(turn: Turn, *, up_to_action: bool = False) -> Prompt:
    """What a first turn answered; `up_to_action` adds its reply up to the action."""
    if not up_to_action or turn.answer_span is None:
        return turn.prompt
    return turn.prompt.then(turn.completion_ids[: turn.answer_span[0]])
