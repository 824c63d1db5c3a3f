"""Sokoban: expected rewards and boards are worked out by hand from the rules."""

from __future__ import annotations

import itertools
import time

import pytest

from moored.envs.sokoban.env import Sokoban
from moored.envs.sokoban.rooms import draw_rows
from moored.envs.tiles import SOKOBAN_TILES, draw_tiles
from moored.errors import EnvError
from moored.reply import format_reply

ONE_BOX = ["######", "#__O_#", "#_PX_#", "#____#", "#____#", "######"]
TWO_BOXES = ["#######", "#_____#", "#PX_O_#", "#_XO__#", "#######"]


def played(level: list[str], actions: str) -> tuple[Sokoban, list[float]]:
    """The environment and the rewards after U, D, L, R actions."""
    env = Sokoban(level=level)
    env.reset(0)
    names = {name[0]: name for name in env.actions}
    return env, [env.act(names[action]).reward for action in actions]


def board(env: Sokoban) -> list[str]:
    return draw_rows(env._room, env._boxes, env._player)


# Dynamics and rewards


def test_last_push_earns_the_box_and_the_room_and_ends_the_episode():
    env, rewards = played(ONE_BOX, "DR")
    assert rewards == [-0.1, -0.1]
    assert board(env) == ["######", "#__O_#", "#__X_#", "#__P_#", "#____#", "######"]
    outcome = env.act("Up")
    assert (outcome.reward, outcome.terminated, outcome.success) == (10.9, True, True)
    assert board(env) == ["######", "#__√_#", "#__P_#", "#____#", "#____#", "######"]


def test_each_box_earns_one_and_only_the_last_ends_the_episode():
    env, rewards = played(TWO_BOXES, "RRLLD")
    assert rewards == [-0.1, 0.9, -0.1, -0.1, -0.1]
    assert board(env) == ["#######", "#_____#", "#___√_#", "#PXO__#", "#######"]
    assert env.act("Right").reward == 10.9


def test_box_pushed_off_its_target_costs_one():
    env, rewards = played(["#######", "#P√_XO#", "#_____#", "#######"], "R")
    assert rewards == [-1.1]
    assert board(env) == ["#######", "#_SXXO#", "#_____#", "#######"]


def test_box_pushed_from_target_to_target_costs_the_step_only():
    env, rewards = played(["########", "#P√O__X#", "########"], "RRRR")
    assert rewards == [-0.1, -1.1, -0.1, -0.1]
    assert board(env) == ["########", "#_OOPXX#", "########"]


@pytest.mark.parametrize(
    "level, action",
    [
        (["#####", "#PXO#", "#####"], "Left"),
        (["#####", "#PXO#", "#####"], "Up"),
        (["######", "#PXXO#", "#O___#", "######"], "Right"),
        (["######", "#XP_O#", "######"], "Left"),
    ],
    ids=["wall beside", "wall above", "two boxes in a row", "box against the wall"],
)
def test_blocked_move_costs_a_step_and_changes_nothing(level, action):
    env = Sokoban(level=level)
    env.reset(0)
    outcome = env.act(action)
    assert (outcome.reward, outcome.changed, outcome.terminated) == (-0.1, False, False)
    assert board(env) == level


# Turns


def test_one_turn_plays_two_actions_and_reports_them():
    env = Sokoban(level=ONE_BOX)
    env.reset(0)
    result = env.step(format_reply("go round", "Down || right || Up"))
    assert result.reward == pytest.approx(-0.2)
    assert not result.is_over
    assert result.metrics == {"num_actions": 2.0, "num_effective_actions": 2.0}
    assert result.observation == (
        "Reward: -0.2.\nTurn 2 of 5.\n######\n#__O_#\n#__X_#\n#__P_#\n#____#\n######\n"
        "Player: (3, 3)\nBoxes: (2, 3)\nTargets: (1, 3)\n"
        "Actions left: 8, at most 2 this turn.\n"
        "Reply as <think>your reasoning</think><answer>your answer</answer>."
    )
    final = env.step(format_reply("", "Up"))
    assert (final.reward, final.is_over, final.success) == (10.9, True, True)
    with pytest.raises(EnvError, match="call reset"):
        env.step(format_reply("", "Up"))


def test_actions_left_are_those_the_turns_left_can_hold():
    env = Sokoban(level=ONE_BOX, max_turns=4, max_actions=7)
    system, user = env.reset(0)
    assert "at most 7 in all, in at most 4 turns" in system.text
    assert "Further actions are ignored." in system.text
    assert "Actions left: 7, at most 2 this turn." in user.text
    for left in (6, 4, 2):
        assert f"Actions left: {left}, at most 2" in str(env.step("malformed").observation)
    env.reset(0)
    for left in ("5, at most 2", "3, at most 2", "1, at most 1"):
        assert f"Actions left: {left} this" in str(env.step(format_reply("", "Up||Up")).observation)
    rules = Sokoban(level=ONE_BOX, max_turns=2, max_actions=99).reset(0)
    assert "at most 4 in all" in rules[0].text
    assert "Actions left: 4, at most 2 this turn." in rules[1].text


def test_prompt_states_the_limits_it_was_given():
    system, user = Sokoban(
        max_turns=7, max_actions=9, max_actions_per_turn=3, format_penalty=-0.5
    ).reset(3)
    assert "at most 3 a turn" in system.text
    assert "at most 9 in all, in at most 7 turns" in system.text
    assert "malformed reply earns -0.5" in system.text
    assert "Turn 1 of 7" in user.text
    assert "Actions left: 9, at most 3 this turn" in user.text


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Up",
        "<answer>Up</answer>",
        "<think></think><answer></answer>",
        "<think></think><answer>Up || </answer>",
        "<think></think><answer>Jump</answer>",
        "<think></think><answer>Uр</answer>",  # Cyrillic er
        "<think><think></think><answer>Up</answer>",
        "x" * 1_000_000,
        "<think>" * 150_000,
        f"<think></think><answer>{'Up || ' * 160_000}Up</answer>",
        f"<think></think><answer>{'|' * 1_000_000}</answer>",
    ],
    ids=lambda reply: f"{reply[:40]}_{len(reply)}",
)
def test_malformed_reply_costs_the_penalty_and_moves_nothing(reply):
    env = Sokoban(level=ONE_BOX)
    env.reset(0)
    start = time.process_time()
    result = env.step(reply)
    assert time.process_time() - start < 1.0
    assert (result.reward, result.is_valid, result.is_over) == (-0.2, False, False)
    assert board(env) == ONE_BOX


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({}, -0.2),
        ({"max_actions_per_turn": 5}, -0.5),
        ({"max_actions_per_turn": 5, "max_actions": 3}, -0.3),
        ({"max_actions_per_turn": 1, "max_actions": 3}, -0.1),
        # One of two boxes can be pushed off its target, then one of three by either action.
        ({"rows": 7, "cols": 7, "boxes": 2}, -1.2),
        ({"rows": 7, "cols": 7, "boxes": 3}, -2.2),
        ({"rows": 7, "cols": 7, "boxes": 4}, -2.2),
        ({"format_penalty": -0.1}, -0.1),  # RAGEN's rule
        ({"format_penalty": -2}, -2),
    ],
)
def test_a_malformed_reply_costs_what_the_dearest_valid_turn_may(options, reward):
    env = Sokoban(**options)
    system, _ = env.reset(0)
    assert f"A malformed reply earns {reward:g}, moves nothing" in system.text
    result = env.step("no tags")
    assert (result.reward, result.penalty) == (pytest.approx(reward), result.reward)
    assert str(result.observation).startswith(f"Malformed reply. Reward: {reward:g}.")


def test_two_boxes_pushed_off_in_one_turn_cost_what_a_malformed_reply_does():
    level = ["#######", "#_____#", "#_√___#", "#P√___#", "#_X_O_#", "#_____#", "#######"]
    env = Sokoban(level=level)
    env.reset(0)
    dearest = env.step(format_reply("", "Right || Up")).reward
    assert dearest == pytest.approx(-2.2)
    env.reset(0)
    assert env.step("no tags").reward == pytest.approx(dearest)


# Views


def test_grid_view_shows_the_symbols_only():
    text = Sokoban(level=ONE_BOX, view="grid").reset(0)[1].text
    assert "\n".join(["Turn 1 of 5.", *ONE_BOX, "Actions left: 10"]) in text


def test_coord_view_is_enough_to_rebuild_the_room():
    level = ["#####", "#P_##", "#X#√#", "#_O_#", "#####"]
    text = Sokoban(level=level, view="coord").reset(0)[1].text
    assert (
        "Room: 5 rows, 5 columns; rows 0 and 4 and columns 0 and 4 are wall.\n"
        "Inner walls: (1, 3), (2, 2)\n"
        "Player: (1, 1)\nBoxes: (2, 1), (2, 3)\nTargets: (2, 3), (3, 2)\n"
    ) in text
    assert "#" not in text


def test_image_view_is_one_picture_of_whole_tiles():
    env = Sokoban(level=ONE_BOX, view="image", tile_px=16)
    system, user = env.reset(0)
    (picture,) = user.images
    assert picture.size == (96, 96)  # pyright: ignore[reportAttributeAccessIssue]
    assert "orange crate" in system.text and "Symbols" not in system.text
    again = env.reset(0)[1].images[0]
    assert picture.tobytes() == again.tobytes()  # pyright: ignore[reportAttributeAccessIssue]


def test_no_two_tiles_look_alike():
    picture = draw_tiles(["".join(SOKOBAN_TILES)], SOKOBAN_TILES, 32).convert("RGB")
    tiles = [picture.crop((x, 0, x + 32, 32)).tobytes() for x in range(0, 7 * 32, 32)]
    for a, b in itertools.combinations(tiles, 2):
        differing = sum(abs(x - y) > 40 for x, y in zip(a, b, strict=True))
        assert differing > 0.08 * len(a)


# Options


def test_level_may_be_one_string():
    env = Sokoban(
        level="""
        #####
        #PXO#
        #####
        """
    )
    env.reset(0)
    assert board(env) == ["#####", "#PXO#", "#####"]
    assert env.step(format_reply("", "Right")).reward == 10.9


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rows": 2}, "rows must lie in 3 to 64, got 2"),
        ({"cols": 65}, "cols must lie in 3 to 64, got 65"),
        ({"boxes": 0}, "boxes must be at least 1, got 0"),
        ({"rows": 4, "cols": 4, "boxes": 2}, "need 5 cells inside the border, 4×4 has 4"),
        ({"max_solution": 11}, "<= 10 actions, got 2 and 11"),
        ({"min_solution": 7, "max_turns": 3}, "<= 6 actions, got 7 and 6"),
        ({"min_solution": 0}, "got 0 and 10"),
        ({"tile_px": 0}, "tile_px must lie in 4 to 256, got 0"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"level": ONE_BOX, "min_solution": 3}, "are for drawn rooms"),
        ({"level": ONE_BOX, "levels_file": "x"}, "both given"),
    ],
)
def test_bad_option_is_refused(options, message):
    with pytest.raises(EnvError, match=message):
        Sokoban(**options)


# Contract
