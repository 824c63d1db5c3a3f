"""The stored simulation is what the code gives today, and the page and its figure show it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

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
    simulation, plan = script("simulation"), importlib.import_module("moored.plan.simulation")
    for name, way in {"streams": {}, "lockstep": {"mode": "lockstep"}}.items():
        found = simulation.record(plan.simulate(simulation.scenario(300, **way)))
        assert found == STORED["growth"][name]["300"]


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
