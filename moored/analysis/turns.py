"""Turn positions of one step, where files tell turns apart: collapse may start late in episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moored.analysis.diagnosis import Plan
from moored.analysis.encode import encode_step
from moored.analysis.sample import Draw, StepDraw
from moored.analysis.scorers import Scorer
from moored.diagnostics.pairs import PairSet
from moored.errors import MooredError

MOST_TURNS = 10
"""Positions looked at; each costs as much as a step."""


def draw_turns(
    draw_turn: Callable[[int], Draw], step: int | None, *, turn: int
) -> dict[int, StepDraw]:
    """Draws of every turn position of a step but `turn`, up to the last that has rows."""
    found: dict[int, StepDraw] = {}
    for position in range(1, MOST_TURNS + 1):
        if position == turn:
            continue
        of_step = [drawn for drawn in draw_turn(position).steps if drawn.step == step]
        if not of_step:
            break
        found[position] = of_step[0]
    return found


def plan_turns(
    plan: Plan,
    turns: Mapping[int, StepDraw],
    scorer: Scorer,
    *,
    turn: int,
    num_pairs: int,
    max_tokens: int | None = None,
) -> Plan:
    """Add other turn positions of the last step than `turn`; each costs a look, with the same N.

    One that cannot be measured is skipped: the steps can be, and matter more.
    """
    planned: dict[int, PairSet] = {}
    skipped: dict[int, str] = {}
    for position, drawn in turns.items():
        try:
            pairs = encode_step(
                drawn,
                scorer.encoder,
                num_prompts=plan.num_prompts,
                num_pairs=num_pairs,
                max_tokens=max_tokens,
            )
            scorer.check_fits(pairs)
        except MooredError as error:
            skipped[position] = str(error)
            continue
        planned[position] = pairs
    more = sum(scorer.cost(pairs) for pairs in planned.values())
    return replace(
        plan,
        turn=turn,
        turns=planned,
        skipped_turns=skipped,
        token_forwards=plan.token_forwards + more,
    )
