"""2048: the rules line by line, noise from the episode only, winnable but not by chance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.envs.game2048 import (
    Board,
    Game2048,
    add_tile,
    can_move,
    draw_board,
    largest_tile,
    slide,
    slide_line,
    split_tile,
)
from moored.errors import EnvError
from moored.reply import format_reply

EMPTY: Board = ((0, 0, 0, 0),) * 4
STUCK: Board = ((2, 4, 8), (16, 32, 2), (4, 8, 16))


def game(board: Board, episode_seed: int = 0, **options: int) -> Game2048:
    env = Game2048(size=len(board), **options)
    env.reset(0)
    env.start(board, random.Random(episode_seed))
    return env


def wins(env: Game2048, rng: random.Random | None, num_games: int) -> int:
    """Games won by the oracle, or by random play when `rng` is given."""
    won = 0
    for seed in range(num_games):
        env.reset(seed, episode_seed=1000 + seed)
        done = False
        while not done:
            answer = " || ".join(rng.choices(env.actions, k=2)) if rng else env.oracle()
            result = env.step(format_reply("", answer))
            done = result.is_over
        won += result.success
    return won


@pytest.mark.parametrize(
    ("line", "slid", "merged"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),
        ((0, 2, 0, 4), (2, 4, 0, 0), 0),
        ((2, 0, 0, 2), (4, 0, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),  # the pair nearest the wall merges
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),  # a merged tile does not merge again
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
        ((8, 8, 4, 4), (16, 8, 0, 0), 24),
    ],
)
def test_line_slides_and_merges_towards_its_start(
    line: tuple[int, ...], slid: tuple[int, ...], merged: int
):
    assert slide_line(line) == (slid, merged)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("Left", ((4, 0, 0), (2, 0, 0), (2, 4, 0))),
        ("Right", ((0, 0, 4), (0, 0, 2), (0, 2, 4))),
        ("Up", ((4, 0, 2), (2, 0, 4), (0, 0, 0))),
        ("Down", ((0, 0, 0), (2, 0, 2), (4, 0, 4))),
    ],
)
def test_board_slides_in_the_direction_named(action: str, expected: Board):
    board = ((2, 0, 2), (2, 0, 0), (2, 0, 4))
    assert slide(board, action) == (expected, 4)


def test_a_new_largest_tile_earns_its_increase_and_no_other_merge_anything():
    env = game(((4, 4, 0, 0), (8, 8, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)))
    result = env.step(format_reply("", "Left"))
    assert result.reward == (16 - 8) / 64
    assert not result.is_over
    env = game(((4, 4, 0, 0), (8, 0, 0, 16), (0, 0, 0, 0), (0, 0, 0, 0)))
    assert env.step(format_reply("", "Left")).reward == 0.0


def test_a_game_earns_the_growth_of_its_largest_tile():
    env = Game2048()
    for seed in range(20):
        env.reset(seed, seed)
        first, total, done = largest_tile(env._board), 0.0, False
        while not done:
            result = env.step(format_reply("", env.oracle()))
            total, done = total + result.reward, result.is_over
        # A new 4 among 2s would grow the largest tile without pay; here the largest is 8 at least.
        assert first >= 8
        assert total == pytest.approx((largest_tile(env._board) - first) / 64)


def test_a_constant_policy_earns_little():
    env, total = Game2048(), 0.0
    for seed in range(200):
        env.reset(seed, 1000 + seed)
        done = False
        while not done:
            result = env.step(format_reply("", "Up || Left"))
            total, done = total + result.reward, result.is_over
    assert total / 200 < 0.3


def test_effective_action_adds_exactly_one_tile():
    env = game(((0, 0, 0, 8), *EMPTY[1:]))
    env.step(format_reply("", "Left"))
    tiles = sorted(int(word) for word in env.state().split() if word != ".")
    assert tiles in ([2, 8], [4, 8])


def test_action_without_effect_adds_no_tile_and_counts():
    env = game(((8, 0, 0, 0), *EMPTY[1:]))
    before = env.state()
    result = env.step(format_reply("", "Left || Up"))
    assert result.reward == 0.0
    assert result.metrics == {"num_actions": 2.0, "num_effective_actions": 0.0}
    assert env.state() == before
    assert "Actions left: 8" in str(result.observation)


def test_target_tile_wins_at_once():
    env = game(((32, 32, 0, 0), *EMPTY[1:]))
    result = env.step(format_reply("", "Right || Up"))
    assert (result.reward, result.terminated, result.success) == (0.5, True, True)
    assert result.metrics["num_actions"] == 1.0


def test_game_ends_when_no_action_changes_the_board():
    # Left merges the 4s; the new tile, 2 or 4, fills the last cell between 16 and 8.
    board = ((4, 4, 16), (16, 32, 8), (4, 8, 16))
    assert can_move(board)
    assert not can_move(STUCK)
    env = game(board)
    result = env.step(format_reply("", "Left"))
    assert (result.terminated, result.success, result.reward) == (True, False, 0.0)


def test_new_tiles_are_2_nine_times_in_ten_and_reach_every_empty_cell():
    rng = random.Random(1)
    boards = [add_tile(EMPTY, rng) for _ in range(3000)]
    tiles = [max(map(max, board)) for board in boards]
    assert set(tiles) == {2, 4}
    assert 0.08 < tiles.count(4) / 3000 < 0.12
    cells = [tuple(map(bool, sum(board, ()))) for board in boards]
    assert len(set(cells)) == 16
    assert all(cells.count(cell) > 130 for cell in set(cells))  # 187.5 expected


@given(st.integers(0, 10_000), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_pieces_of_a_split_tile_add_up_to_it(seed: int, num_splits: int):
    pieces = split_tile(64, num_splits, random.Random(seed))
    assert sum(pieces) == 64
    assert len(pieces) == num_splits + 1
    assert all(piece >= 2 and piece.bit_count() == 1 for piece in pieces)


def test_first_board_holds_the_pieces_of_the_target():
    for seed in range(20):
        tiles = [tile for row in Game2048().make_task(random.Random(seed)) for tile in row if tile]
        assert len(tiles) == 6
        assert sum(tiles) == 64


def test_usual_game_starts_with_two_tiles():
    env = Game2048(splits=None, target=16)
    for seed in range(20):
        tiles = [tile for row in env.make_task(random.Random(seed)) for tile in row if tile]
        assert len(tiles) == 2
        assert set(tiles) <= {2, 4}


def test_oracle_wins_most_games_and_random_play_few():
    env = Game2048()
    assert wins(env, None, 60) >= 45
    assert wins(env, random.Random(0), 60) <= 15


def test_oracle_takes_the_shortest_way():
    assert game(((32, 0, 32, 0), *EMPTY[1:])).plan() == ["Left"]
    board = ((32, 0, 0, 0), (16, 0, 0, 0), (16, 0, 0, 0), (0, 0, 0, 0))
    assert len(game(board).plan()) == 2
    assert game(((2, 0, 0, 0), *EMPTY[1:])).plan()[0] in ("Down", "Right")


def test_board_is_drawn_aligned_with_dots():
    board = ((64, 0, 2), (0, 0, 0), (4, 128, 0))
    assert draw_board(board) == " 64   .   2\n  .   .   .\n  4 128   ."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "size must be 3, 4 or 5, got 2"),
        ({"target": 48}, "power of two"),
        ({"target": 4}, "from 8, got 4"),
        ({"splits": 0}, "1 to 10"),
        ({"splits": 11}, "1 to 10"),
        ({"splits": 4, "target": 8}, "1 to 3"),
        ({"size": 3, "splits": 8}, "1 to 7"),
        ({"splits": 5, "max_turns": 2}, "4 actions"),
        ({"splits": None, "target": 32}, "out of reach"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str):
    with pytest.raises(EnvError, match=message):
        Game2048(**options)
