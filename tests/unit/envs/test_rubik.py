"""Rubik's 2×2: turns agree with the geometry of a cube, distances with the known counts."""

from __future__ import annotations

import itertools
import random

import pytest

from moored.envs import rubik
from moored.envs.base import SPLIT_SEEDS
from moored.envs.rubik import COLOURS, INVERSE, SOLVED, TURNS, Rubik, Scramble, draw_net, solve
from moored.errors import EnvError
from moored.reply import format_reply

Vector = tuple[int, int, int]

# Where "right" and "down" on each face of the net point: x right, y up, z to the viewer.
FACES: dict[str, tuple[Vector, Vector]] = {
    "U": ((1, 0, 0), (0, 0, 1)),
    "L": ((0, 0, 1), (0, -1, 0)),
    "F": ((1, 0, 0), (0, -1, 0)),
    "R": ((0, 0, -1), (0, -1, 0)),
    "B": ((-1, 0, 0), (0, -1, 0)),
    "D": ((1, 0, 0), (0, 0, -1)),
}


def cross(a: Vector, b: Vector) -> Vector:
    return (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])


def dot(a: Vector, b: Vector) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def outward(face: str) -> Vector:
    right, down = FACES[face]
    return cross(down, right)


def places() -> list[tuple[Vector, Vector]]:
    """Corner and outward direction of the 24 places, in the order of the net."""
    found = []
    for face, (right, down) in FACES.items():
        out = outward(face)
        for y, x in itertools.product((-1, 1), (-1, 1)):
            axes = zip(out, right, down, strict=True)
            a, b, c = (o + x * r + y * d for o, r, d in axes)
            found.append(((a, b, c), out))
    return found


def turn_clockwise(v: Vector, axis: Vector) -> Vector:
    """Rotate by -90 degrees about `axis`: v × axis, plus the part along the axis."""
    side, along = cross(v, axis), dot(v, axis)
    return (side[0] + along * axis[0], side[1] + along * axis[1], side[2] + along * axis[2])


def apply(moves: str, cube: bytes = SOLVED) -> bytes:
    for name in moves.split():
        cube = cube.translate(TURNS[name])
    return cube


def order(moves: str) -> int:
    cube, count = apply(moves), 1
    while cube != SOLVED:
        cube, count = apply(moves, cube), count + 1
    return count


def game(moves: str, **options: int) -> Rubik:
    """A game whose cube was scrambled by `moves`, white up and green in front."""
    env = Rubik(**options)
    env.reset(0)
    env.start(Scramble(apply(moves), COLOURS), random.Random(0))
    return env


@pytest.mark.parametrize("face", ["U", "R", "F"])
def test_turn_rotates_one_layer_of_the_cube_in_space(face: str):
    at, axis = places(), outward(face)
    for place, (corner, out) in enumerate(at):
        moved = (corner, out)
        if dot(corner, axis) == 1:
            moved = (turn_clockwise(corner, axis), turn_clockwise(out, axis))
        assert TURNS[face][place] == at.index(moved)


def test_net_of_the_solved_cube():
    assert draw_net(SOLVED, COLOURS) == (
        "     w w\n     w w\no o  g g  r r  b b\no o  g g  r r  b b\n     y y\n     y y"
    )


def test_r_lifts_the_right_column_of_the_front_to_the_top():
    # Front goes up, up goes back, back goes down, down goes to the front.
    assert draw_net(apply("R"), COLOURS) == (
        "     w g\n     w g\no o  g y  r r  w b\no o  g y  r r  w b\n     y b\n     y b"
    )


def test_u_carries_the_front_row_to_the_left():
    lines = draw_net(apply("U"), COLOURS).splitlines()
    assert lines[2:4] == ["g g  r r  b b  o o", "o o  g g  r r  b b"]


def test_f_carries_the_top_to_the_right():
    assert draw_net(apply("F"), COLOURS) == (
        "     w w\n     o o\no y  g g  w r  b b\no y  g g  w r  b b\n     r r\n     y y"
    )


@pytest.mark.parametrize("name", TURNS)
def test_each_turn_has_order_four_and_is_undone_by_its_inverse(name: str):
    assert order(name) == 4
    assert apply(f"{name} {INVERSE[name]}") == SOLVED


def test_orders_of_known_sequences():
    assert order("R U R' U'") == 6
    assert order("R U") == 15  # 105 on the 3x3 cube: 15 for its corners, 7 for its edges


def test_turns_never_move_the_corner_down_back_left():
    corner = [p for p, (at, _) in enumerate(places()) if at == (-1, -1, -1)]
    assert len(corner) == 3
    assert all(turn[place] == place for turn in TURNS.values() for place in corner)


def test_number_of_positions_at_each_distance_is_the_known_one():
    layers, seen = [[SOLVED]], {SOLVED: ""}
    for _ in range(8):
        layers.append(rubik._expand(layers[-1], seen))
    # Quarter-turn metric; all 3,674,160 positions lie within 14 turns.
    assert [len(layer) for layer in layers] == [1, 6, 27, 120, 534, 2256, 8969, 33058, 114149]
    for distance in range(9):
        for cube in random.Random(distance).sample(layers[distance], min(6, len(layers[distance]))):
            path = solve(cube)
            assert len(path) == distance
            assert apply(" ".join(path), cube) == SOLVED


def test_cube_can_be_held_in_24_ways_without_mirroring_it():
    ways = rubik._colourings()
    assert len(ways) == len(set(ways)) == 24
    opposite = {"w": "y", "y": "w", "o": "r", "r": "o", "g": "b", "b": "g"}
    for up, left, front, right, back, down in ways:
        assert (opposite[up], opposite[left], opposite[front]) == (down, right, back)
    # White up fixes everything except a spin: green, red, blue, orange stay in this order.
    spins = {way[1:5] for way in ways if way[0] == "w"}
    assert spins == {"ogrb", "grbo", "rbog", "bogr"}


@pytest.mark.parametrize("depth", [1, 4, 6, 7, 9])
def test_task_is_exactly_depth_turns_from_solved(depth: int):
    env = Rubik(depth=depth)
    for seed in range(10):
        task = env.make_task(random.Random(seed))
        assert len(solve(task.cube)) == depth


def test_default_tasks_cover_all_depths_from_1_to_4():
    env = Rubik()
    depths = [len(solve(env.make_task(random.Random(seed)).cube)) for seed in range(80)]
    assert set(depths) == {1, 2, 3, 4}


def test_every_turn_costs_and_solving_pays_ten():
    env = game("R U")
    result = env.step(format_reply("", "F || F'"))
    assert result.reward == pytest.approx(-0.2)
    assert not result.is_over
    result = env.step(format_reply("", "u' || r'"))
    assert result.reward == pytest.approx(9.8)
    assert (result.terminated, result.truncated, result.success) == (True, False, True)


def test_game_stops_at_the_solution_and_leaves_the_rest_of_the_reply():
    result = game("F").step(format_reply("", "F' || U"))
    assert result.reward == pytest.approx(9.9)
    assert result.success
    assert result.metrics["num_actions"] == 1.0


def test_oracle_solves_every_task_by_the_shortest_way():
    env = Rubik(depth=(1, 10))
    for seed in (*range(30), *(seeds[5] for seeds in SPLIT_SEEDS.values())):
        env.reset(seed)
        depth, total = len(env.plan()), 0.0
        while not (result := env.step(format_reply("", env.oracle()))).is_over:
            total += result.reward
        assert result.success
        assert total + result.reward == pytest.approx(10 - 0.1 * depth)


def test_a_cube_held_in_another_way_is_the_same_task():
    env = Rubik()
    keys = {env.task_key(Scramble(apply("R U"), colours)) for colours in rubik._colourings()}
    assert len(keys) == 1
    assert env.task_key(Scramble(apply("R U'"), COLOURS)) not in keys


@pytest.mark.parametrize(("most", "reward"), [(1, -0.1), (2, -0.2), (6, -0.6)])
def test_a_malformed_reply_costs_what_a_turn_full_of_actions_does(most, reward):
    env = Rubik(max_actions_per_turn=most)
    system, _ = env.reset(0)
    assert f"A malformed reply earns {reward:g}, moves nothing" in system.text
    assert env.step("no tags").reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "got 0"),
        ({"depth": 11}, "within 1 and 10"),
        ({"depth": 12, "max_actions": 50, "max_turns": 50}, "within 1 and 11"),
        ({"max_actions": 3}, "holds 3 actions"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str):
    with pytest.raises(EnvError, match=message):
        Rubik(**options)
