"""Sudoku: one solution each, fits the budget, never pays twice."""

from __future__ import annotations

import itertools
import random

import pytest

from moored.envs.base import SPLIT_SEEDS
from moored.envs.sudoku import Puzzle, Sudoku, has_one_solution, remove_cells, solutions
from moored.errors import EnvError
from moored.reply import format_reply

GRID = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)


def blank(grid: tuple[int, ...], *cells: int) -> tuple[int, ...]:
    return tuple(0 if cell in cells else digit for cell, digit in enumerate(grid))


def is_complete(grid: tuple[int, ...], box: int) -> bool:
    size = box * box
    rows = [set(grid[at : at + size]) for at in range(0, size * size, size)]
    columns = [set(grid[at::size]) for at in range(size)]
    corners = [(r, c) for r in range(0, size, box) for c in range(0, size, box)]
    inside = list(itertools.product(range(box), range(box)))
    boxes = [{grid[(r + dr) * size + c + dc] for dr, dc in inside} for r, c in corners]
    return all(unit == set(range(1, size + 1)) for unit in rows + columns + boxes)


def all_small_grids() -> list[tuple[int, ...]]:
    rows = list(itertools.permutations((1, 2, 3, 4)))
    bands = [a + b for a in rows for b in rows if len({*a[:2], *b[:2]}) == 4]
    return [top + low for top in bands for low in bands if is_complete(top + low, 2)]


def two_blank_game(**options: int) -> Sudoku:
    """GRID without its 1 at r1c1 and its 4 at r2c2."""
    env = Sudoku(**options)
    env.reset(0)
    env.start(Puzzle(blank(GRID, 0, 5), GRID), random.Random(0))
    return env


def test_solver_finds_each_of_the_288_grids_of_size_4_once():
    found = list(solutions([0] * 16))
    assert len(found) == 288
    assert sorted(found) == sorted(all_small_grids())


def test_solver_solves_a_known_9x9_puzzle():
    rows = (
        "53..7.... 6..195... .98....6. 8...6...3 4..8.3..1 7...2...6 .6....28. ...419..5 ....8..79"
    )
    answer = (
        "534678912 672195348 198342567 859761423 426853791 713924856 961537284 287419635 345286179"
    )
    cells = [int(digit) for digit in rows.replace(" ", "").replace(".", "0")]
    assert list(solutions(cells)) == [tuple(int(digit) for digit in answer.replace(" ", ""))]


def test_swappable_rectangle_has_two_solutions():
    # r1c1, r1c2, r3c1, r3c2 hold 1 2 / 2 1: the two digits can change places.
    cells = blank(GRID, 0, 1, 8, 9)
    assert len(list(solutions(cells))) == 2
    assert not has_one_solution(cells)
    assert has_one_solution(blank(GRID, 0, 1, 8))


def test_impossible_grid_has_no_solution():
    # r1c1 sees 2 3 4 in its row and 1 in its column.
    assert list(solutions((0, 2, 3, 4, 1, *[0] * 11))) == []


def test_too_many_cells_cannot_be_removed():
    # No 4x4 Sudoku with fewer than 4 given cells has one solution.
    assert remove_cells(GRID, 13, random.Random(0)) is None


def test_puzzles_of_size_4_match_exactly_one_of_all_grids():
    env, grids = Sudoku(blanks=(1, 10)), all_small_grids()
    sizes = set()
    for seed in range(60):
        puzzle = env.make_task(random.Random(seed))
        fits = [g for g in grids if all(c in (0, d) for c, d in zip(puzzle.cells, g, strict=True))]
        assert fits == [puzzle.solution]
        sizes.add(puzzle.cells.count(0))
    assert sizes == set(range(1, 11))


def test_puzzles_of_size_9_are_complete_unique_and_in_range():
    env = Sudoku(size=9, blanks=(20, 30), max_actions=30, max_turns=15)
    for seed in range(10):
        puzzle = env.make_task(random.Random(seed))
        assert is_complete(puzzle.solution, 3)
        assert 20 <= puzzle.cells.count(0) <= 30
        assert list(solutions(puzzle.cells)) == [puzzle.solution]


def test_right_digits_share_a_reward_of_one_and_end_the_game():
    result = two_blank_game().step(format_reply("", "r1c1=1 || R2C2=4"))
    assert (result.reward, result.terminated, result.success, result.is_valid) == (
        1.0,
        True,
        True,
        True,
    )


def test_wrong_digit_costs_and_leaves_the_board():
    env = two_blank_game()
    before = env.state()
    result = env.step(format_reply("", "r1c1=2"))
    assert result.reward == -0.5
    assert not result.is_over
    assert result.metrics == {"num_actions": 1.0, "num_effective_actions": 0.0}
    assert env.state() == before


def test_given_cell_cannot_be_overwritten_not_even_with_its_own_digit():
    env = two_blank_game()
    before = env.state()
    assert env.step(format_reply("", "r1c2=2 || r1c2=1")).reward == -1.0
    assert env.state() == before


def test_cell_never_pays_twice():
    env = two_blank_game()
    assert env.step(format_reply("", "r1c1=1")).reward == 0.5
    assert env.step(format_reply("", "r1c1=1")).reward == -0.5
    assert env.step(format_reply("", "r1c1=3 || r2c2=4")).reward == 0.0


def test_blind_guessing_does_not_pay():
    # Of the four digits for an empty cell one earns a share and three cost it: -1/2 on average.
    env, rng, total = Sudoku(), random.Random(0), 0.0
    for seed in range(200):
        env.reset(seed)
        done = False
        while not done:
            cells = [cell for cell, digit in enumerate(env._cells) if not digit]
            guesses = [(rng.choice(cells), rng.randint(1, 4)) for _ in range(2)]
            answer = " || ".join(f"r{c // 4 + 1}c{c % 4 + 1}={digit}" for c, digit in guesses)
            result = env.step(format_reply("", answer))
            total, done = total + result.reward, result.is_over
    assert total / 200 < -0.3


def test_the_prompt_states_what_a_digit_earns_and_costs():
    env = Sudoku(blanks=7)
    rules = env.reset(0)[0].text
    assert "A right digit earns 1/7." in rules
    assert "a cell that is filled already, earns -1/7" in rules
    right = env.oracle().split(" || ")[0]
    assert env.step(format_reply("", right)).reward == 1 / 7
    filled = next(cell for cell, digit in enumerate(env._cells) if digit)
    wrong = f"r{filled // 4 + 1}c{filled % 4 + 1}=1"
    assert env.step(format_reply("", wrong)).reward == -1 / 7


def test_grid_is_drawn_with_labels_and_boxes():
    assert two_blank_game().state() == (
        "   c1 c2 | c3 c4\n"
        "   ------+------\n"
        "r1  .  2 |  3  4\n"
        "r2  3  . |  1  2\n"
        "   ------+------\n"
        "r3  2  1 |  4  3\n"
        "r4  4  3 |  2  1"
    )


@pytest.mark.parametrize("size", [4, 9])
def test_oracle_fills_every_puzzle_for_a_reward_of_one(size: int):
    env = Sudoku(size=size)
    for seed in (*range(15), *(seeds[0] for seeds in SPLIT_SEEDS.values())):
        env.reset(seed)
        rewards = []
        while not (result := env.step(format_reply("", env.oracle()))).is_over:
            rewards.append(result.reward)
        assert result.success
        assert sum([*rewards, result.reward]) == pytest.approx(1.0)


def test_prompt_gives_the_pattern_and_the_real_limits_not_all_placements():
    system, user = Sudoku(size=9, max_actions=12, max_turns=7, max_actions_per_turn=3).reset(1)
    assert "9x9" in system.text and "3x3 box" in system.text
    assert "r<row>c<column>=<digit>" in system.text
    assert "r9c9=9" not in system.text
    assert "at most 3 a turn" in system.text and "at most 12 in all" in system.text
    assert "at most 7 turns" in system.text
    assert "Turn 1 of 7." in user.text and "Actions left: 12" in user.text


@pytest.mark.parametrize(("blanks", "reward"), [(4, -0.5), (8, -0.25), ((1, 1), -2.0)])
def test_a_malformed_reply_costs_what_a_turn_of_wrong_digits_does(blanks, reward):
    env = Sudoku(blanks=blanks)
    system, _ = env.reset(0)
    assert f"A malformed reply earns {reward:g}, moves nothing" in system.text
    assert env.step("no tags").reward == reward
    env.reset(0)
    wrong = [f"{right[:5]}{int(right[5]) % 4 + 1}" for right in env.plan()[:1]] * 2
    assert env.step(format_reply("", " || ".join(wrong))).reward == reward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 6}, "size must be 4 or 9, got 6"),
        ({"blanks": 11}, "within 1 and 10"),
        ({"blanks": 0}, "got 0"),
        ({"blanks": (5, 4)}, r"got \(5, 4\)"),
        ({"blanks": (4, 8), "max_actions": 7}, "holds 7 actions"),
        ({"blanks": (4, 8), "max_turns": 3}, "holds 6 actions"),
        ({"size": 9, "blanks": 51, "max_actions": 99, "max_turns": 99}, "allows 50"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str):
    with pytest.raises(EnvError, match=message):
        Sudoku(**options)
