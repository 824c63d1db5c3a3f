"""Turn positions of the last look: which are drawn, what they cost, how they are reported."""

from __future__ import annotations

import numpy as np

from moored.analysis.sample import Draw, draw
from moored.analysis.scorers import Encoder, Scorer, Scorers
from moored.analysis.scoring import (
    MOST_TURNS,
    Size,
    diagnose,
    draw_turns,
    make_plan,
    plan_turns,
)
from moored.files.records import Record

SCORER = Scorer(
    name="toy",
    score=lambda requests: [
        [np.full(len(ids), -1.0 - (r.prompt.ids[0] != ids[0])) for ids in r.continuations]
        for r in requests
    ],
    encoder=Encoder(None),
    shares_prompt=True,
    max_context=20,
)


def rows(turn: int, num_prompts: int = 4, prompt_tokens: int = 1, step: int = 7) -> list[Record]:
    """Two replies of three tokens to each prompt; the prompt of a later turn is longer."""
    return [
        Record(
            step=step,
            prompt=np.full(prompt_tokens * turn, p),
            response=np.array([p, k, turn]),
            think=(0, 3),
        )
        for p in range(num_prompts)
        for k in range(2)
    ]


def drawn(records: list[Record]) -> Draw:
    return draw(records, num_prompts=4, num_pairs=8)


SIZE = Size(num_pairs=8)


def test_positions_are_drawn_until_one_has_no_rows():
    asked = []

    def draw_turn(turn: int) -> Draw:
        asked.append(turn)
        return drawn(rows(turn) if turn < 4 else [])

    assert list(draw_turns(draw_turn, turn=1)) == [2, 3]
    assert asked == [2, 3, 4]
    assert len(draw_turns(lambda turn: drawn(rows(turn)), turn=1)) == MOST_TURNS - 1


def test_each_turn_costs_a_look_and_the_looked_at_one_is_not_scored_again():
    main = drawn(rows(1))
    plan = make_plan(main, SCORER, SIZE)
    # Each of 4 prompts once, and 8 reasonings of 3 tokens under each.
    assert plan.token_forwards == 4 * 1 + 4 * 8 * 3
    turns = draw_turns(lambda turn: drawn(rows(turn) if turn < 4 else []), turn=1)
    plan = plan_turns(plan, turns, SCORER, SIZE, turn=1)
    assert plan.token_forwards == 4 * (1 + 2 + 3) + 3 * 4 * 8 * 3
    calls = []
    scorers = Scorers.single(SCORER)
    found = diagnose(plan, main, scorers, draws=0, on_column=lambda: calls.append(1)).worst
    assert len(calls) == sum(len(pairs.prompts) for pairs in plan.pair_sets) == 12
    assert [look.turn for look in found.turns] == [1, 2, 3]
    assert found.turns[0].report is found.looks[-1].report
    # Own prompt e times likelier a token than each of the three others.
    assert np.isclose(found.turns[2].report.mi_estimate, np.log(4 / (1 + 3 / np.e)))


def test_a_turn_with_too_few_prompts_or_too_long_ones_is_skipped_and_named():
    main = drawn(rows(1))
    plan = make_plan(main, SCORER, SIZE)
    turns = {2: drawn(rows(2, num_prompts=3)), 3: drawn(rows(3, prompt_tokens=6))}
    planned = plan_turns(plan, turns, SCORER, SIZE, turn=1)
    assert planned.token_forwards == plan.token_forwards
    skipped = planned.series[0].skipped_turns
    assert "needs 4 distinct prompts" in skipped[2]
    assert "do not fit into the 20" in skipped[3]
    found = diagnose(planned, main, Scorers.single(SCORER), draws=0).worst
    assert found.turns == ()
    assert [each["turn"] for each in found.to_dict()["skipped_turns"]] == [2, 3]  # pyright: ignore
