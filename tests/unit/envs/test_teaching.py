"""What environments say beside their oracles: facts of the state, guesses, mistakes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from moored.envs.countdown import working
from moored.envs.lean.theorems import split_statement
from moored.envs.mix import make_env, open_env
from moored.envs.teaching import Guesses, Reasons, Spoils
from tests.contract.registered import needs_bubblewrap

LEVEL = ["######", "#P__##", "#_X__#", "#O_###", "######"]
LAKE = ["FFFH", "SFFF", "FFHG", "FFFF"]


def facts(env, answer: str = "", seed: int = 0) -> str:
    env.reset(seed)
    return env.reasoning(answer or env.oracle(), random.Random(1))


@pytest.mark.parametrize("view", ["grid", "coord", "grid_coord"])
def test_sokoban_states_places_and_the_way_of_its_box(view):
    # Box (2, 2) to target (3, 1): one row down, one column left.
    said = facts(make_env("sokoban", level=LEVEL, view=view))
    assert "at (1, 1), box at (2, 2), target at (3, 1)." in said
    assert said.endswith("Down 1, Left 1.")


def test_frozen_lake_names_player_goal_and_holes():
    said = facts(make_env("frozen_lake", map=LAKE))
    assert "at (1, 0), goal at (2, 3), holes at (0, 3), (2, 2). " in said
    assert said.endswith("Down 1, Right 3.")


def test_countdown_works_out_its_expression():
    assert working("3 * (2 + 4) - 10 / 4") == [
        "2 + 4 = 6.",
        "3 * 6 = 18.",
        "10 / 4 = 2.5.",
        "18 - 2.5 = 15.5.",
    ]
    env = make_env("countdown")
    asked = env.reset(0)[1].text.split("\n")[0]
    numbers, target = asked.removeprefix("Numbers: ").removesuffix(".").split(". Target: ")
    said = facts(env)
    assert f" {numbers}, target {target}. " in said and said.endswith(f"= {target}.")


def test_the_bandit_says_which_kind_of_arm_pays_more():
    assert " is risky, " in facts(make_env("bandit"))
    said = facts(make_env("bandit", safe_reward=0.5))
    assert " is safe, " in said and re.search(r"\b[Ss]afe (arm )?pays more", said)


def test_word_problems_are_worked_out_made_or_read(tmp_path):
    made = make_env("metamath", level=1)
    said = facts(made, "4711", seed=11)
    assert "=" in said and said.endswith("4711.")
    steps = "Half of 6 is 6 / 2 = <<6/2=3>>3.\\nThen 3 + 1 = $<<3+1=4>>4."
    row = {"question": "How many?", "answer": steps.replace("\\n", "\n") + "\n#### 4"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    read = make_env("metamath", source=str(tmp_path / "rows.jsonl"))
    for seed in (0, 1 << 40, 2 << 40):  # the one row belongs to one of the splits
        try:
            said = facts(read, seed=seed)
        except ValueError:
            continue
    assert said == "Half of 6 is 6 / 2 = 3. Then 3 + 1 = $4."


def test_noise_replaces_actions_by_known_ones_at_the_stated_rate():
    plan = " || ".join(["Up"] * 4000)
    env: Any = make_env("sokoban")
    noised = env.spoil(plan, 0.4, random.Random(0)).split(" || ")
    assert set(noised) == {"Up", "Down", "Left", "Right"}
    # A quarter of the replacements draws the same action again: 1 - 0.4 * 3 / 4.
    assert noised.count("Up") / 4000 == pytest.approx(0.7, abs=0.03)


def test_a_guess_fits_the_turn():
    env: Any = make_env("sokoban", max_actions_per_turn=3)
    env.reset(0)
    rng = random.Random(0)
    assert {env.guess(rng).count("||") + 1 for _ in range(100)} == {1, 2, 3}


def test_what_is_offered_can_be_asked_for():
    offers = {
        name: [kind.__name__ for kind in (Reasons, Guesses, Spoils) if isinstance(env, kind)]
        for name in ("sokoban", "bandit", "search")
        for env in [make_env(name)]
    }
    assert offers["sokoban"] == offers["bandit"] == ["Reasons", "Guesses", "Spoils"]
    assert offers["search"] == ["Reasons", "Guesses"]


ORACLES = ("sokoban", "frozen_lake", "countdown", "metamath", "bandit", "sudoku", "2048", "rubik")


@pytest.mark.parametrize(
    "name", [*ORACLES, "search", "webshop", pytest.param("code", marks=needs_bubblewrap)]
)
def test_reasoning_of_every_environment_is_about_its_task(name):
    with open_env(name) as env:
        said = {facts(env, seed=seed) for seed in range(6)}
    # The bandit has two ways to say which of its few arms pays more.
    assert len(said) >= (3 if name == "bandit" else 6)


def test_sudoku_names_what_row_column_and_box_hold_already():
    env: Any = make_env("sudoku", blanks=4)
    shown = [line.split() for line in env.reset(3)[1].text.splitlines() if line.startswith("r")]
    grid = [[cell for cell in row[1:] if cell != "|"] for row in shown]
    first = env.oracle().split(" || ")[0]
    row, column = int(first[1]) - 1, int(first[3]) - 1
    in_row = sorted(cell for cell in grid[row] if cell != ".")
    in_column = sorted(line[column] for line in grid if line[column] != ".")
    said = env.reasoning(first, random.Random(0))
    start = f"Row {row + 1} has {' '.join(in_row)}, column {column + 1} has {' '.join(in_column)},"
    assert said.startswith(start) and said.endswith(f"r{row + 1}c{column + 1} is {first[5]}.")


def test_2048_lists_its_tiles_and_what_the_first_action_merges():
    env: Any = make_env("2048", target=8, splits=1)
    env.reset(0)
    env._board = ((4, 0, 0, 4), (0,) * 4, (0, 2, 0, 0), (0,) * 4)
    said = env.reasoning("Left || Up", random.Random(0))
    assert said.endswith("4 at (0, 0), 4 at (0, 3), 2 at (2, 1). Left merges tiles into 8.")
    assert "merges tiles" not in env.reasoning("Up", random.Random(0))


def test_the_cube_names_the_colours_of_the_faces_it_turns():
    env: Any = make_env("rubik", depth=2)
    up, *_ = env.reset(0)[1].text.splitlines()[1:]
    said = env.reasoning(env.oracle(), random.Random(0))
    assert said.startswith(f"Up {up.replace(' ', '')}")
    assert said.endswith(f"{env.oracle().replace(' || ', ', then ')}.")


def test_a_theorem_is_told_with_its_hypotheses_and_goal():
    text = "theorem goal (x y : Nat) (h : x + 1 = y) : x < y"
    assert split_statement(text) == ("(x y : Nat) (h : x + 1 = y)", "x < y")
    assert split_statement("theorem goal : 2 + 2 = 4") == ("", "2 + 2 = 4")
