"""Sokoban's rooms: drawn ones, read ones, and their shortest solutions.

Solutions are checked against a slow search that shares nothing with the package.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from moored.envs.base import SPLIT_SEEDS
from moored.envs.sokoban.env import Sokoban
from moored.envs.sokoban.rooms import Room, draw_rows, make_room, parse_room, read_levels
from moored.envs.sokoban.solver import solve
from moored.errors import EnvError
from moored.reply import format_reply

STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
BOXOBAN = """; 0
##########
#        #
# @$.    #
#   $  . #
#        #
#   $.   #
#        #
#  . $   #
#        #
##########

; 1
#####
#+$ #
#  *#
#####
"""


def board(env: Sokoban) -> list[str]:
    return draw_rows(env._room, env._boxes, env._player)


def read(rows: list[str]):
    """Symbol of each (row, col), the player, the boxes."""
    where = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    player = next(cell for cell, symbol in where.items() if symbol in "PS")
    return where, player, frozenset(cell for cell, symbol in where.items() if symbol in "X√")


def shortest_length(rows: list[str]) -> int | None:
    """Breadth-first over single moves on (row, col) pairs: slow, and nothing like the solver."""
    where, player, boxes = read(rows)
    targets = frozenset(cell for cell, symbol in where.items() if symbol in "O√S")
    layer, seen = [(player, boxes)], {(player, boxes)}
    for length in itertools.count():
        if any(boxes == targets for _, boxes in layer):
            return length
        layer = [new for old in layer for new in moves(where, *old).values()]
        layer = [new for new in dict.fromkeys(layer) if new not in seen]
        seen.update(layer)
        if not layer:
            return None


def moves(where, player, boxes):
    """Player and boxes after each action that is not blocked."""
    after = {}
    for action, (dr, dc) in STEPS.items():
        ahead = player[0] + dr, player[1] + dc
        beyond = player[0] + 2 * dr, player[1] + 2 * dc
        if where[ahead] == "#" or (ahead in boxes and (where[beyond] == "#" or beyond in boxes)):
            continue
        after[action] = ahead, boxes ^ {ahead, beyond} if ahead in boxes else boxes
    return after


# Generated rooms


@pytest.mark.parametrize(
    "size, boxes, lengths, num_rooms",
    [
        ((6, 6), 1, range(2, 11), 150),
        ((5, 9), 1, range(12, 16), 20),
        ((5, 6), 1, range(9, 10), 20),
        ((7, 7), 2, range(6, 11), 12),
        ((8, 8), 2, range(3, 9), 6),
    ],
)
def test_shortest_solution_of_a_drawn_room_lies_in_the_range(size, boxes, lengths, num_rooms):
    rng = random.Random(11)
    found = Counter()
    for _ in range(num_rooms):
        room = make_room(rng, size[0], size[1], boxes, lengths)
        rows = draw_rows(room, room.boxes, room.player)
        assert (len(rows), len(rows[0]), room.boxes.bit_count()) == (*size, boxes)
        assert not room.boxes & room.targets
        assert parse_room(rows) == room
        found[shortest_length(rows)] += 1
    assert set(found) <= set(lengths)
    assert len(found) >= min(4, num_rooms // 4, len(lengths))


def test_lengths_of_drawn_rooms_are_spread_over_the_range():
    rng = random.Random(2)
    rooms = [make_room(rng, 6, 6, 1, range(2, 11)) for _ in range(900)]
    counts = Counter(len(solve(room, room.boxes, room.player) or []) for room in rooms)
    assert sorted(counts) == list(range(2, 11))
    assert min(counts.values()) > 40


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows": 8, "cols": 8, "boxes": 2},
        {"max_turns": 3, "max_actions": 10},
        {"rows": 7, "cols": 7, "boxes": 3, "max_turns": 10, "max_actions": 20},
        {"min_solution": 9, "max_solution": 10, "view": "coord"},
        {"max_turns": 200, "max_actions": 400},
    ],
    ids=str,
)
def test_oracle_solves_every_drawn_room_within_the_budget(options):
    env = Sokoban(**options)
    for seeds in SPLIT_SEEDS.values():
        for task_seed in seeds[:6]:
            env.reset(task_seed)
            result, total, num_actions = None, 0.0, 0.0
            while result is None or not result.is_over:
                result = env.step(format_reply("", env.oracle()))
                total += result.reward
                num_actions += result.metrics["num_actions"]
            assert result.success
            assert num_actions <= env.action_budget
            assert total == pytest.approx(10 + options.get("boxes", 1) - 0.1 * num_actions)


def test_impossible_length_is_refused_with_the_options_to_change():
    env = Sokoban(rows=3, cols=5, min_solution=9)
    with pytest.raises(EnvError, match=r"3×5 room with 1 boxes that takes 9 to 10 actions"):
        env.reset(0)


# Solver


@pytest.mark.parametrize("size, boxes", [((6, 6), 1), ((6, 7), 2)])
def test_plan_is_shortest_from_any_position_on_the_way(size, boxes):
    rng = random.Random(8)
    env = Sokoban(rows=size[0], cols=size[1], boxes=boxes)
    verdicts = Counter()
    for seed in range(25):
        env.reset(seed)
        while rng.random() < 0.9 and not env.act(rng.choice(env.actions)).terminated:
            pass
        expected, plan = shortest_length(board(env)), env.plan()
        assert len(plan) == (expected or 0)
        verdicts[expected is None] += 1
        outcomes = [env.act(action) for action in plan]
        assert not plan or outcomes[-1].success
    assert min(verdicts[True], verdicts[False]) > 0


def test_plan_of_a_dead_position_is_empty():
    env = Sokoban(level=["#######", "#P√_XO#", "#_____#", "#######"])
    env.reset(0)
    env.act("Right")
    assert env.plan() == []
    assert env.oracle() == ""


def test_solver_handles_a_boxoban_sized_room(tmp_path):
    room = read_levels(write(tmp_path, BOXOBAN))[0]
    plan = solve(room, room.boxes, room.player)
    assert plan is not None
    env = Sokoban(level=draw_rows(room, room.boxes, room.player), max_turns=60, max_actions=120)
    env.reset(0)
    assert [env.act(action).success for action in plan].index(True) == len(plan) - 1


# Rows of symbols


@pytest.mark.parametrize(
    "level, message",
    [
        ([], "empty"),
        (["", "", ""], "empty"),
        (["#####", "#P$O#", "#####"], "line 2: unknown symbol '\\$'"),
        (["#####", "#PXO_#", "#####"], "line 2: all rows .* got 6 symbols after 5"),
        (["#####", "#PXO_", "#####"], "line 2: the border must be wall, got '#PXO_'"),
        (["##_##", "#PXO#", "#####"], "line 1: the border"),
        (["#####", "#_XO#", "#####"], "exactly one player, got 0"),
        (["######", "#PSXX#", "#_O__#", "######"], "exactly one player, got 2"),
        (["#####", "#PXX#", "#__O#", "#####"], "as many boxes as targets, got 2 and 1"),
        (["#####", "#P√_#", "#####"], "nothing is left to solve"),
        ([None, None], "quote them in YAML"),
    ],
)
def test_bad_level_is_refused_with_the_line_and_the_remedy(level, message):
    with pytest.raises(EnvError, match=message):
        Sokoban(level=level)


# Level files


def write(folder: Path, text: str) -> Path:
    path = folder / "levels.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_boxoban_file_is_read_symbol_by_symbol(tmp_path):
    rooms = read_levels(write(tmp_path, BOXOBAN))
    assert [room.boxes.bit_count() for room in rooms] == [4, 2]
    small = rooms[1]
    assert draw_rows(small, small.boxes, small.player) == ["#####", "#SX_#", "#__√#", "#####"]


def test_levels_of_a_file_are_drawn_by_seed_and_split_by_content(tmp_path):
    rng = random.Random(3)
    rooms = [make_room(rng, 6, 6, 1, range(2, 11)) for _ in range(80)]
    env = Sokoban(levels_file=write(tmp_path, boxoban_text(rooms)))
    drawn = {
        split: {env.reset(seed)[1].text for seed in seeds[:200]}
        for split, seeds in SPLIT_SEEDS.items()
    }
    assert len(drawn["train"]) > 40
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values()))
    assert env.reset(5) == env.reset(5, episode_seed=9)


def test_too_few_levels_for_a_split_are_told_at_construction(tmp_path, caplog):
    # The hashes of BOXOBAN's two rooms cannot fill three splits; 80 rooms do.
    rng = random.Random(3)
    rooms = [make_room(rng, 6, 6, 1, range(2, 11)) for _ in range(80)]
    Sokoban(levels_file=write(tmp_path, boxoban_text(rooms)))
    assert caplog.text == ""
    Sokoban(levels_file=write(tmp_path, BOXOBAN))
    assert "levels.txt: none of its 2 rooms belongs to the" in caplog.text


def boxoban_text(rooms: list[Room]) -> str:
    table = str.maketrans("_O√XPS", " .*$@+")
    levels = ("\n".join(draw_rows(room, room.boxes, room.player)) for room in rooms)
    return "".join(f"; {n}\n{level.translate(table)}\n\n" for n, level in enumerate(levels))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "levels.txt' holds no rooms"),
        ("; 0\n\n; 1\n", "holds no rooms"),
        ("; 0\n#####\n#@$.#\n#####\n\n; 1\n#####\n#@X.#\n#####\n", "line 8: unknown symbol 'X'"),
        ("; 0\n#####\n#@$.#\n####\n", "levels.txt, line 4: all rows"),
        ("; 0\n#####\n#@$ #\n#####\n", "levels.txt, room at line 2: .* got 1 and 0"),
    ],
)
def test_bad_level_file_is_refused_with_file_and_line(tmp_path, text, message):
    with pytest.raises(EnvError, match=message):
        Sokoban(levels_file=write(tmp_path, text))
