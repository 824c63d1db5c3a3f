"""The stored simulation is what the code gives today, and the page and its figure show it."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[3]
STORED = json.loads((ROOT / "benchmarks" / "results" / "simulation.json").read_text())
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch):
    """Import a script of `benchmarks/` by name, as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def rows(title: str) -> dict[str, list[str]]:
    """A table of the page below a line that begins like `title`: first cell -> the others."""
    begin = PAGE.index("\n|", PAGE.index(title)) + 1
    block = PAGE[begin : PAGE.index("\n\n", begin)].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block]
    return {name: others for name, *others in cells[2:]}


def test_a_simulation_of_today_gives_the_stored_numbers(script):
    simulation = script("simulation")
    for name, way in {"streams": {}, "lockstep": {"mode": "lockstep"}}.items():
        found = simulation.record(simulation.simulate_seeds(simulation.scenario(100, **way)))
        assert found == STORED["growth"][name]["100"]


def test_seeds_are_taken_together_as_steps_of_one_run(script):
    simulation = script("simulation")
    given = simulation.scenario(10, env_s=simulation.REMOTE)
    found = simulation.simulate_seeds(given)
    alone = [simulation.simulate(replace(given, seed=seed)) for seed in simulation.SEEDS]
    assert found.num_turns == 3 * 2 * 10 * 5
    assert found.turns_per_s == pytest.approx(found.num_turns / sum(one.seconds for one in alone))
    busy_s = sum(one.driver_share * one.seconds for one in alone)
    assert found.driver_share * found.seconds == pytest.approx(busy_s)
    assert len(found.rollout_s) == 6


def test_a_driver_alone_handles_the_turns_that_were_measured(script):
    # The measured seconds hold the beginnings of episodes: they must not be charged twice.
    simulation = script("simulation")
    still = {"reply_tokens": simulation.Spread(median=1.0), "step_s": 0.0, "row_s": 0.0}
    found = simulation.simulate(simulation.scenario(200, **still, turns=5, network_s=0.0))
    assert found.bound == "driver"
    assert found.turns_per_s == pytest.approx(simulation.DRIVER_TURNS_PER_S, rel=0.01)


def test_the_rate_of_the_driver_is_the_median_of_the_stored_runs(script):
    stored = json.loads((ROOT / "benchmarks" / "results" / "driver.json").read_text())["runs"]
    case = "sokoban, 63 x 16 episodes, env_workers=1"
    newest = [
        run["figures"][case]["processor"] for run in stored if run["code"] == stored[-1]["code"]
    ]
    rate = median(figures["turns_per_s"] for figures in newest)
    assert rate == pytest.approx(script("simulation").DRIVER_TURNS_PER_S, rel=1e-3)


def test_the_page_shows_the_stored_turns_a_second():
    names = {
        "lockstep": "lockstep",
        "streams": "streams",
        "streams, samplers behind Ray calls": "streams, Ray calls",
        "the same with 4 drivers": "streams, Ray, 4 drivers",
        "programs in a sandbox, streams": "code, streams",
        "slow remote environments, lockstep": "remote, lockstep",
        "slow remote environments, streams": "remote, streams",
    }
    table = rows("Turns a second of all workers")
    assert set(table) == set(names)
    for shown, stored in names.items():
        for cell, workers in zip(table[shown], ("100", "1000", "3000", "10000"), strict=True):
            one = STORED["growth"][stored][workers]
            assert cell.removesuffix(", driver") == f"{one['turns_per_s']:,.0f}"
            assert cell.endswith("driver") == (one["bound"] == "driver")


def test_the_page_shows_the_stored_comparison_with_real_rollouts():
    table = rows("Queues are compared with the formula")
    assert len(table) == len(STORED["measured"]["compared"])
    pairs = zip(table.values(), STORED["measured"]["compared"].values(), strict=True)
    for (real, simulated, error), own in pairs:
        assert real.startswith(f"{own['real_s']:.2f} ±")
        assert simulated.startswith(f"{own['simulated_s']:.2f}")
        assert error == f"{100 * own['error']:.0f} %".replace("-", "−")


def test_the_figure_of_the_page_is_drawn_from_what_is_stored(script):
    drawn = script("simulation_figure").draw(STORED)
    assert drawn == (ROOT / "docs" / "results" / "simulation.svg").read_text()
