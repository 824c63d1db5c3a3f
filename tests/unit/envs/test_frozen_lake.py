"""FrozenLake: gymnasium's dynamics, slips per episode, maps, views, oracle."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS

from moored.envs.frozen_lake import DIRECTIONS, FrozenLake, Lake, View, draw_board
from moored.errors import EnvError
from moored.reply import format_reply

SMALL = ["SFF", "FHF", "FFG"]
BOTTLENECK = ["FHHHF", "SFFFG", "FHHHF"]
GYM_MAPS = [MAPS["4x4"], MAPS["8x8"], SMALL, BOTTLENECK, ["GFS"], ["HFFF", "SFHG"]]


def say(*actions: str) -> str:
    return format_reply("I walk.", " || ".join(actions))


def play(env: FrozenLake, *actions: str):
    """One action per turn; the list of results, up to the end of the game."""
    results = []
    for action in actions:
        results.append(env.step(say(action)))
        if results[-1].is_over:
            break
    return results


def board(observation: object) -> str:
    """The symbol rows of a grid observation."""
    lines = str(observation).split("\n")
    return "\n".join(line for line in lines if line and set(line) <= set("P_OGX√"))


def gym_lake(rows: list[str], **options: Any) -> Any:
    return gymnasium.make("FrozenLake-v1", desc=rows, **options).unwrapped


# Dynamics


def test_a_walk_around_the_hole_reaches_the_goal_and_earns_one():
    env = FrozenLake(map=SMALL, slip=0)
    first = env.reset(0)
    assert board(first[1].content) == "P__\n_O_\n__G"
    results = play(env, "Right", "Right", "Down", "Down")
    assert [board(result.observation) for result in results[:3]] == [
        "_P_\n_O_\n__G",
        "__P\n_O_\n__G",
        "___\n_OP\n__G",
    ]
    assert [result.reward for result in results] == [0, 0, 0, 1]
    assert [result.terminated for result in results] == [False, False, False, True]
    assert [result.success for result in results] == [False, False, False, True]
    assert env.state() == "___\n_O_\n__√"


def test_a_hole_ends_the_game_without_reward():
    env = FrozenLake(map=SMALL, slip=0)
    env.reset(0)
    result = env.step(say("Right", "Down"))
    assert (result.reward, result.terminated, result.success) == (0, True, False)
    assert not result.truncated
    assert env.state() == "___\n_X_\n__G"
    with pytest.raises(EnvError, match="over"):
        env.step(say("Up"))


def test_walking_against_the_edge_stays_in_place_and_counts_as_an_action():
    env = FrozenLake(map=SMALL, slip=0)
    env.reset(0)
    result = env.step(say("Up", "Left"))
    assert board(result.observation) == "P__\n_O_\n__G"
    assert result.metrics == {"num_actions": 2, "num_effective_actions": 0}
    assert "Actions left: 8" in str(result.observation)


@pytest.mark.parametrize("rows", GYM_MAPS)
def test_without_slips_every_step_is_gymnasiums(rows: list[str]):
    rng = random.Random(0)
    theirs = gym_lake(rows, is_slippery=False)
    ours = FrozenLake(map=rows, slip=0, max_turns=60, max_actions=60, max_actions_per_turn=1)
    for episode in range(30):
        ours.reset(episode, episode)
        assert theirs.reset()[0] == ours._cell
        for _ in range(60):
            action = rng.randrange(4)
            cell, reward, terminated, _, _ = theirs.step(action)
            result = ours.step(say(DIRECTIONS[action]))
            assert (ours._cell, result.reward) == (cell, reward)
            if terminated:
                break
            assert not result.is_over or ours._turn == 60
        assert ours._over and result.is_over


def assert_same_transitions(lake: Lake, slip: float, table: dict) -> None:
    """Compare with gymnasium's `P[cell][action] = [(probability, cell, reward, terminated)]`."""
    for cell, actions in table.items():
        for action, transitions in actions.items():
            difference = np.zeros(len(lake.tiles))
            for probability, after, reward, terminated in transitions:
                difference[after] += probability
                assert terminated == lake.is_end(after)
                assert reward == (lake.tiles[after] == "G" and after != cell)
            for probability, after in lake.outcomes(cell, action, slip):
                difference[after] -= probability
            np.testing.assert_allclose(difference, 0, atol=1e-12)


@pytest.mark.parametrize("rows", GYM_MAPS)
@pytest.mark.parametrize("slip", [0, 0.02, 0.5, 2 / 3, 1])
def test_transition_probabilities_are_gymnasiums(rows: list[str], slip: float):
    table = gym_lake(rows, is_slippery=True, success_rate=1 - slip).P
    assert_same_transitions(Lake.from_rows(rows), slip, table)


# Slips


@pytest.mark.parametrize("slip", [0, 0.02, 0.3, 2 / 3, 1])
def test_moves_played_follow_the_stated_probabilities(slip: float):
    env = FrozenLake(map=["FFF", "FSF", "FFG"], slip=slip)
    num_episodes = 3000
    counts = np.zeros(9)
    for episode in range(num_episodes):
        env.reset(0, episode)
        env.step(say("Right"))
        counts[env._cell] += 1
    expected = np.zeros(9)
    expected[[1, 5, 7]] = slip / 2, 1 - slip, slip / 2
    # Five standard errors; a probability of 0 or 1 leaves no room at all.
    room = 5 * np.sqrt(expected * (1 - expected) / num_episodes)
    assert np.all(np.abs(counts / num_episodes - expected) <= room)


def walk(env: FrozenLake, episode_seed: int) -> list[int]:
    env.reset(3, episode_seed)
    cells = [env._cell]
    for action in DIRECTIONS * 10:
        result = env.step(say(action))
        cells.append(env._cell)
        if result.is_over:
            break
    return cells


def test_slips_are_the_episodes_own_and_the_map_is_the_groups():
    env = FrozenLake(size=12, frozen=1, slip=0.5, max_turns=40, max_actions=40)
    walks, maps = [], set()
    for episode in range(8):
        walks.append(walk(env, episode))
        maps.add(env._lake)
    assert len(maps) == 1
    assert len({tuple(cells) for cells in walks}) == 8
    assert walks == [walk(env, episode) for episode in range(8)]


def test_slips_of_equal_episodes_are_independent_between_tasks():
    # One map, one aim, one episode seed: the slips differ only by the task seed.
    env = FrozenLake(map=["FFF", "FSF", "FFG"], slip=0.5)
    cells = []
    for task_seed in range(400):
        env.reset(task_seed, 7)
        env.step(say("Right"))
        cells.append(env._cell)
    assert 160 < cells.count(5) < 240


# Drawn maps


def test_drawn_maps_have_one_start_one_goal_and_a_way_within_the_budget():
    for env in (
        FrozenLake(),
        FrozenLake(size=7, frozen=0.6),
        FrozenLake(max_turns=1),
        FrozenLake(size=30, frozen=0.8),
    ):
        for seed in range(60):
            env.reset(seed)
            lake = env._lake
            assert len(lake.tiles) == env.size**2
            assert lake.tiles.count("S") == lake.tiles.count("G") == 1
            assert 1 <= (lake.distance() or 0) <= env.action_budget


def test_tiles_are_frozen_as_often_as_asked():
    env = FrozenLake(size=12, frozen=0.8, max_turns=50, max_actions=50)
    tiles = "".join(env.make_task(random.Random(seed)).tiles for seed in range(200))
    share = tiles.count("F") / (tiles.count("F") + tiles.count("H"))
    # Only solvable maps are kept, which have a little more ice than the draw.
    assert 0.795 < share < 0.815


def test_a_lake_without_ice_can_still_be_drawn_with_start_next_to_goal():
    env = FrozenLake(frozen=0)
    env.reset(1)
    assert env._lake.distance() == 1
    assert env._lake.tiles.count("H") == 14


def test_distance_is_the_shortest_safe_way():
    assert Lake.from_rows(SMALL).distance() == 4
    assert Lake.from_rows(MAPS["4x4"]).distance() == 6
    assert Lake.from_rows(MAPS["8x8"]).distance() == 14
    assert Lake.from_rows(["SHG"]).distance() is None


# Options and prompt


def test_a_map_may_be_one_text_with_a_row_a_line():
    env = FrozenLake(map="SF\nHG", slip=0)
    assert board(env.reset(0)[1].content) == "P_\nOG"


def test_a_map_may_be_oblong_and_hold_several_goals():
    env = FrozenLake(map=["GFSFFG"], slip=0)
    env.reset(0)
    assert env.plan() == ["Left", "Left"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"map": ["SF", "G"]}, "equal length"),
        ({"map": ["SX", "FG"]}, "letters S, F, H, G"),
        ({"map": []}, "equal length"),
        ({"map": ["SS", "FG"]}, "exactly one S"),
        ({"map": ["SF", "FF"]}, "at least one G"),
        ({"slip": 1.01}, r"slip .* got 1.01"),
        ({"slip": float("nan")}, r"slip .* got nan"),
        ({"frozen": -0.1}, r"frozen .* got -0.1"),
        ({"size": 1}, "size must be at least 2, got 1"),
        ({"tile_px": 4}, "tile_px must be at least 8, got 4"),
        ({"view": "video"}, "view must be one of .* got 'video'"),
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
    ],
)
def test_unusable_options_are_named_with_what_was_given(options: dict, complaint: str):
    with pytest.raises(EnvError, match=complaint):
        FrozenLake(**options)


def test_each_view_explains_exactly_what_it_shows():
    texts = {}
    views: tuple[View, ...] = ("grid", "coord", "grid_coord", "image")
    for view in views:
        system, user = FrozenLake(map=SMALL, view=view).reset(0)
        texts[view] = system.text + user.text
    positions = "Lake: 3 rows, 3 columns\nPlayer: (0, 0)\nGoal: (2, 2)\nHoles: (1, 1)"
    for view, text in texts.items():
        assert ("√" in text) == ("P__\n_O_\n__G" in text) == (view in ("grid", "grid_coord"))
        assert ("(row, column)" in text) == (positions in text) == (view in ("coord", "grid_coord"))
        assert ("red coat" in text) == (view == "image")


# Pictures


def test_the_picture_has_one_tile_of_the_asked_size_per_cell():
    env = FrozenLake(map=["SFFH", "FFFG"], view="image", slip=0)
    images = env.reset(0)[1].images
    assert [image.size for image in images] == [(128, 64)]  # pyright: ignore
    assert FrozenLake(map=["SG"], view="image", tile_px=20).reset(0)[1].images[0].size == (40, 20)  # pyright: ignore


def test_every_symbol_has_its_own_picture_and_equal_symbols_the_same():
    tiles = [draw_board([symbol], 32).tobytes() for symbol in "_OGPX√"]
    assert len(set(tiles)) == 6
    pixels = np.asarray(draw_board(["_O_"], 32))
    np.testing.assert_array_equal(pixels[:, :32], pixels[:, 64:])
    assert pixels[16, 48].sum() < pixels[16, 16].sum() / 3  # a hole is dark, ice is pale


def test_the_picture_follows_the_player():
    env = FrozenLake(map=["SFG"], view="image", slip=0)
    first = np.asarray(env.reset(0)[1].images[0])
    observation = env.step(say("Right")).observation
    assert isinstance(observation, list)
    image = next(part["image"] for part in observation if part["type"] == "image")
    second = np.asarray(image)
    np.testing.assert_array_equal(first[:, :32], second[:, 32:64])
    np.testing.assert_array_equal(first[:, 32:64], second[:, :32])
    np.testing.assert_array_equal(first[:, 64:], second[:, 64:])


# Oracle


def run_oracle(env: FrozenLake, task_seed: int, episode_seed: int) -> bool:
    env.reset(task_seed, episode_seed)
    while True:
        result = env.step(format_reply("", env.oracle()))
        assert result.is_valid
        if result.is_over:
            return result.success


def test_without_slips_the_oracle_walks_the_shortest_safe_way():
    env = FrozenLake(size=5, frozen=0.7, slip=0)
    for seed in range(100):
        env.reset(seed)
        assert len(env.plan()) == env._lake.distance()
        assert run_oracle(env, seed, 0)


def test_without_slips_the_oracle_uses_the_last_action_of_the_budget():
    env = FrozenLake(map=["SFFFFFG"], slip=0, max_turns=3, max_actions=6)
    assert run_oracle(env, 0, 0)


def test_at_the_usual_slip_the_oracle_nearly_always_arrives():
    env = FrozenLake()
    assert sum(run_oracle(env, seed, seed + 1000) for seed in range(300)) >= 292


def test_the_oracle_knows_the_exact_chance_on_a_corridor():
    # Walls of holes on both sides: every one of three moves must go as intended, 0.9 ** 3.
    env = FrozenLake(map=["HHHH", "SFFG", "HHHH"], slip=0.1, max_actions_per_turn=1)
    env.reset(0)
    assert env.plan() == ["Right", "Right", "Right"]
    assert env._odds is not None
    assert env._odds.values[3, 4] == pytest.approx(0.9**3)


def test_with_slips_the_oracle_prefers_a_detour_to_a_walk_between_holes():
    # The way between the holes is safe with 0.85 * 0.7 * 0.7 at most; the one below has room.
    rows = ["HHHH", "SFFG", "FHHF", "FFFF", "FFFF"]
    steady = FrozenLake(map=rows, slip=0, max_turns=20, max_actions=40)
    slippery = FrozenLake(map=rows, slip=0.3, max_turns=20, max_actions=40)
    steady.reset(0)
    slippery.reset(0)
    assert steady.plan() == ["Right", "Right", "Right"]
    assert slippery.plan()[0] == "Down"


def test_on_ice_that_always_slips_the_oracle_aims_across():
    # Right or Left slips to Up or Down, so either may enter the goal below; Up and Down never do.
    env = FrozenLake(map=["HSH", "HGH"], slip=1)
    env.reset(0)
    assert env.plan()[0] in ("Left", "Right")


def test_beyond_its_bounds_the_oracle_takes_the_shortest_safe_path():
    rows = ["S" + "F" * 59, *["F" * 60] * 58, "F" * 59 + "G"]
    env = FrozenLake(map=rows, slip=0.3, max_turns=200, max_actions=400)
    env.reset(0)
    assert len(env.plan()) == 118
    small = FrozenLake(map=["SFG"], slip=0.3, max_turns=200, max_actions=400)
    small.reset(0)
    assert small.plan() == ["Right", "Right"]


def test_the_oracle_always_names_an_action_while_the_game_lasts():
    env = FrozenLake(map=["SHG"], slip=0)
    assert not run_oracle(env, 0, 0)
    assert env.plan() == []


# Replies
