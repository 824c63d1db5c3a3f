"""What `moored gradients` shows on terminals of different width."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from moored.cli.gradients import tables


def bucket(low: float, high: float) -> dict[str, object]:
    term = {"norm": 0.123, "snr": 1.25, "norm_interval": (0.1, 0.2)}
    return {
        "rv_low": low,
        "rv_high": high,
        "num_groups": 8,
        "num_tokens": 12345,
        "terms": {"task": term, "kl": term, "entropy": {**term, "snr": math.nan}},
        "cosines": {"task_kl": 0.5, "task_entropy": -0.25, "task_with_rest": math.nan},
    }


RECORD = {"buckets": [bucket(0.015, 0.047), bucket(0.3, 31.0)], "whole": bucket(0.015, 31.0)}


def shown(width: int) -> str:
    file = io.StringIO()
    for table in tables(RECORD, width):
        Console(file=file, width=width).print(table)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_gradients_can_be_read_on_any_terminal(width):
    text = shown(width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    # Two buckets and the whole, of three terms.
    assert text.count("0.12 ± 0.08") == 9
    assert text.count("0.3–31") == text.count("all") == (1 if width == 160 else 3)


def test_a_wide_terminal_has_one_row_for_a_bucket_and_a_dash_for_what_is_not_known():
    (row,) = [line.split() for line in shown(160).splitlines() if "0.3–31" in line]
    norms = ["0.12", "±", "0.08"]
    assert row == [
        *("0.3–31", "8", "12,345"),
        *(*norms, "1.2", *norms, "1.2", *norms, "–"),
        *("–", "+0.50", "-0.25"),
    ]
