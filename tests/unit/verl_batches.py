"""Real `DataProto` batches of verl, made by hand: three groups of four rows, interleaved.

Group a has rewards 1 0 0 1, b 1 1 1 1, c 3 1 1 3: variances 1/4, 0 and 1.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

REWARDS = {"a": (1.0, 0.0, 0.0, 1.0), "b": (1.0, 1.0, 1.0, 1.0), "c": (3.0, 1.0, 1.0, 3.0)}
UIDS = ["a", "b", "c"] * 4
LENGTHS = [2, 3, 1, 4, 2, 3, 1, 4, 2, 3, 4, 1]
"""Response tokens of each row; the third token of a row was written by a tool."""
LOSS_TOKENS = [2, 2, 1, 3, 2, 2, 1, 3, 2, 2, 3, 1]

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is not installed; .ci/run shows how to install it beside moored",
)


def make_batch(**tensors: Any) -> Any:
    """Twelve rows: prompts padded on the left to 3 tokens, responses on the right to 4."""
    import torch
    from verl import DataProto  # pyright: ignore[reportMissingImports]

    width, lengths = max(LENGTHS), torch.tensor(LENGTHS)
    inside = torch.arange(width) < lengths[:, None]
    prompt_lengths = torch.tensor([2, 3, 1] * 4)
    prompt_inside = torch.arange(3) >= 3 - prompt_lengths[:, None]
    prompts = (torch.arange(3)[None] + 10 * (torch.arange(12)[:, None] % 3 + 1)) * prompt_inside
    responses = (torch.arange(12)[:, None] * 4 + torch.arange(width) + 50) * inside
    attention = torch.cat([prompt_inside, inside], dim=1).long()
    scores = torch.zeros(12, width)
    drawn = [REWARDS[uid][row // 3] for row, uid in enumerate(UIDS)]
    scores[torch.arange(12), lengths - 1] = torch.tensor(drawn)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": (inside & (torch.arange(width) != 2)).long(),
            "token_level_scores": scores,
            **tensors,
        },
        non_tensors={"uid": np.array(UIDS, dtype=object), "acc": np.array([0.0, 0.0, 1.0] * 4)},
        meta_info={"temperature": 1.0},
    )
