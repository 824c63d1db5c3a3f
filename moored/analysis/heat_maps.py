"""The heat maps of a report, as Plotly data: rewards of prompts, scores of reasonings.

Shape legend: P prompts of G trajectories each; M reasonings, N prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moored.analysis.figures import SOFT, Chart, base_layout, short

MOST_ROWS = 128
"""Reasonings in a map of scores."""
MIN_LIMIT = 0.02
"""Nats per token at which colours end at least: noise is to look like noise."""


def reward_map(
    rewards_PG: np.ndarray,
    variance_P: np.ndarray,
    *,
    labels: Sequence[str],
    is_kept: Sequence[bool],
    reward_range: tuple[float, float],
    variance_max: float,
) -> Chart:
    """Rewards of the trajectories of each prompt beside the RV of the prompt, largest RV on top.

    The ranges are those of all maps that are shown together, so that colours compare.
    """
    order = np.argsort(variance_P, kind="stable")
    rewards_PG = np.sort(rewards_PG[order], axis=1)[:, ::-1]
    rows = list(range(len(order)))
    texts = [[labels[p]] * rewards_PG.shape[1] for p in order]
    bar = {"orientation": "h", "y": -0.06, "yanchor": "top", "thickness": 8, "nticks": 4}
    data = [
        {
            "type": "heatmap",
            "z": [short(row) for row in rewards_PG],
            "x": list(range(1, rewards_PG.shape[1] + 1)),
            "y": rows,
            "text": texts,
            "zmin": reward_range[0],
            "zmax": reward_range[1],
            "colorscale": "Cividis",
            "hovertemplate": "%{text}<br>reward %{z}<extra></extra>",
            "colorbar": bar | {"x": 0.3, "len": 0.6, "title": {"text": "reward", "side": "bottom"}},
        },
        {
            "type": "heatmap",
            "z": [[value] for value in short(variance_P[order])],
            "x": ["RV"],
            "y": rows,
            "text": [[labels[p]] for p in order],
            "xaxis": "x2",
            "zmin": 0.0,
            "zmax": variance_max,
            "colorscale": "Viridis",
            "hovertemplate": "%{text}<br>RV %{z}<extra></extra>",
            "colorbar": bar | {"x": 0.84, "len": 0.32, "title": {"text": "RV", "side": "bottom"}},
        },
    ]
    plain = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""}
    layout = base_layout("", "", height=340)
    layout |= {"hovermode": "closest", "xaxis": plain | {"domain": [0.0, 0.66]}}
    layout["xaxis2"] = plain | {"domain": [0.74, 0.94]}
    kept = ["kept" if is_kept[p] else "" for p in order]
    layout["yaxis"] = plain | {
        "showticklabels": not all(is_kept) and len(rows) <= 32,
        "tickvals": rows,
        "ticktext": kept,
        "tickfont": {"size": 10},
        "automargin": True,
    }
    return {"data": data, "layout": layout}


def shade_limit(gains: Sequence[np.ndarray]) -> float:
    """Where the colours of maps end that are shown together.

    They have one scale, or a collapsed look would seem as varied as a healthy one.
    """
    peaks = [gain_MN.max(axis=1) for gain_MN in gains]
    return max(float(np.quantile(np.concatenate(peaks), 0.95)), MIN_LIMIT) if peaks else MIN_LIMIT


def score_map(
    gain_MN: np.ndarray, columns_M: np.ndarray, limit: float, blocks_M: np.ndarray | None = None
) -> Chart:
    """Gains of reasonings under prompts, own prompts framed; colours end at `limit` nats.

    Reasonings are sorted by the prompt they were written for, so that reasoning that depends on
    its prompt shows a diagonal. Of many, some of every prompt are shown.
    """
    blocks_M = np.zeros_like(columns_M) if blocks_M is None else blocks_M
    order = _spread(np.lexsort((columns_M, blocks_M)))
    gain_MN, columns_M, blocks_M = gain_MN[order], columns_M[order], blocks_M[order]
    own = [[column == j for j in range(gain_MN.shape[1])] for column in columns_M]
    data = {
        "type": "heatmap",
        "z": [short(row) for row in gain_MN],
        "x": list(range(1, gain_MN.shape[1] + 1)),
        "y": list(range(1, len(order) + 1)),
        "text": [["its own prompt" if mine else "another prompt" for mine in row] for row in own],
        "zmin": -limit,
        "zmax": limit,
        "colorscale": [[0.0, "#c8642b"], [0.5, "rgba(128,128,128,0.1)"], [1.0, "#1f6feb"]],
        "hovertemplate": "reasoning %{y}, prompt %{x}: %{z} nats<br>%{text}<extra></extra>",
        "colorbar": {"thickness": 8, "nticks": 5, "title": {"text": "nats", "side": "right"}},
    }
    layout = base_layout("scored under prompt", "reasoning, by its own prompt", height=340)
    layout |= {"hovermode": "closest", "shapes": _frames(columns_M, blocks_M)}
    layout["xaxis"] |= {"showgrid": False, "dtick": 1 if gain_MN.shape[1] <= 16 else None}
    layout["yaxis"] |= {"showgrid": False, "showticklabels": False, "ticks": ""}
    layout["yaxis"] |= {"autorange": "reversed"}
    return {"data": [data], "layout": layout}


def _spread(order_M: np.ndarray) -> np.ndarray:
    """At most `MOST_ROWS` of them, at equal distances."""
    if len(order_M) <= MOST_ROWS:
        return order_M
    return order_M[np.linspace(0, len(order_M) - 1, MOST_ROWS).round().astype(int)]


def _frames(columns_M: np.ndarray, blocks_M: np.ndarray) -> list[Chart]:
    """A frame around the cells of reasonings under their own prompt."""
    keys = list(zip(blocks_M.tolist(), columns_M.tolist(), strict=True))
    starts = [m for m in range(len(keys)) if m == 0 or keys[m] != keys[m - 1]]
    return [
        {
            "type": "rect",
            "x0": keys[start][1] + 0.5,
            "x1": keys[start][1] + 1.5,
            "y0": start + 0.5,
            "y1": stop + 0.5,
            "line": {"color": SOFT, "width": 1},
        }
        for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True)
    ]
