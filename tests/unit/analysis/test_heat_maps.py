"""The maps of a report: rewards of prompts, scores of reasonings."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from moored.analysis.heat_maps import MIN_LIMIT, MOST_ROWS, reward_map, score_map, shade_limit
from moored.diagnostics.information import Likelihood


def rewards() -> dict:
    return reward_map(
        np.array([[1.0, 0.0], [0.0, np.nan]]),
        np.array([0.25, 0.0]),
        labels=["task 1", "task 2"],
        is_kept=[True, False],
        reward_range=(0.0, 1.0),
        variance_max=0.25,
    )


COLUMNS = np.array([1, 0, 1])


def gains() -> np.ndarray:
    """Three reasonings: each is certain under its own prompt and half as likely under the other."""
    half = math.log(0.5)
    logp_MN = np.array([[half, 0.0], [0.0, half], [half, 0.0]])
    return Likelihood.of(logp_MN, COLUMNS).gain_if_MN


@pytest.mark.parametrize(
    "chart", [rewards(), score_map(gains(), COLUMNS, 0.5)], ids=["rewards", "scores"]
)
def test_plotly_accepts_every_map_and_json_holds_it(chart):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    assert len(graph_objects.Figure(chart).data) == len(chart["data"])
    json.dumps(chart, allow_nan=False)


def test_the_map_has_the_largest_variance_on_top_and_rewards_in_descending_order():
    shown, variance = rewards()["data"]
    # Plotly draws the last row on top.
    assert variance["z"] == [[0.0], [0.25]]
    assert shown["z"][1] == [1.0, 0.0]
    assert rewards()["layout"]["yaxis"]["ticktext"] == ["", "kept"]


def test_a_gain_is_against_the_mean_prompt():
    # Under a prompt drawn at random the likelihood is 3/4.
    assert gains()[0].tolist() == pytest.approx([math.log(2 / 3), math.log(4 / 3)])


def test_reasonings_are_sorted_by_their_own_prompt_which_is_framed():
    chart = score_map(gains(), COLUMNS, 0.5)
    own, other = 0.2877, -0.4055  # log 4/3 and log 2/3
    assert chart["data"][0]["z"] == [[own, other], [other, own], [other, own]]
    assert chart["data"][0]["text"][0] == ["its own prompt", "another prompt"]
    frames = [(s["x0"], s["x1"], s["y0"], s["y1"]) for s in chart["layout"]["shapes"]]
    assert frames == [(0.5, 1.5, 0.5, 1.5), (1.5, 2.5, 1.5, 3.5)]
    assert (chart["data"][0]["zmin"], chart["data"][0]["zmax"]) == (-0.5, 0.5)


def test_observation_swap_is_sorted_by_its_sets_of_observations_first():
    chart = score_map(np.zeros((3, 2)), np.array([0, 1, 0]), 1.0, np.array([1, 0, 0]))
    assert [frame["x0"] for frame in chart["layout"]["shapes"]] == [0.5, 1.5, 0.5]


def test_a_map_that_is_cut_still_has_reasonings_of_every_prompt():
    count, prompts = 4 * MOST_ROWS, 64
    chart = score_map(np.zeros((count, prompts)), np.arange(count) % prompts, 0.5)
    texts = chart["data"][0]["text"]
    shown = {row.index("its own prompt") for row in texts}
    assert shown == set(range(prompts)) and len(texts) == MOST_ROWS


def test_maps_have_one_scale_on_which_noise_looks_like_noise():
    assert shade_limit([gains(), gains() / 100]) == pytest.approx(math.log(4 / 3))
    assert shade_limit([gains() / 1000]) == shade_limit([]) == MIN_LIMIT
