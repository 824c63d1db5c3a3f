"""The plug-in of verl's V1 trainer: its real advantage step on real Ray and TransferQueue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.verl_batches import needs_verl
from tests.warm import run_warm

pytestmark = [needs_verl, pytest.mark.cluster]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    code = "import warnings; warnings.simplefilter('ignore'); "
    done = run_warm([], code=code + "from tests.e2e.verl_step import main; main()", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_verl_finds_the_trainer_and_dropped_groups_lose_both_masks(steps):
    found = steps["filtered"]
    masks = [[1, 1, 1], [1, 1], [0, 0, 0], [0], [0, 0], [0]]
    assert found["response_mask"] == found["loss_mask"] == masks
    assert found["num_updates"] == 1
    # verl would take another name for an asynchronous trainer.
    assert found["mode"] == "sync"


def test_sessions_count_once_and_filling_rows_not_at_all(steps):
    metrics = steps["filtered"]["metrics"]
    assert (metrics["filter/num_groups"], metrics["filter/num_kept"]) == (2, 1)
    assert (metrics["tokens/trained"], metrics["tokens/discarded"]) == (5, 6)


def test_an_update_without_a_kept_group_is_left_out(steps):
    # The same trainer, after the step above.
    assert steps["empty"]["num_updates"] == 1
    assert steps["empty"]["metrics"]["update/is_empty"] == 1
    assert steps["empty"]["response_mask"] == [[1, 1, 1], [1, 1], [1, 1, 1], [1], [1, 1], [0]]


def test_the_soft_estimator_is_found_by_name(steps):
    # GRPO of 1 and 0 with the sample std: half over sqrt(1/2); group a has the largest variance.
    found = [row[0] for row in steps["soft"]["advantages"]]
    assert found == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0, 0, 0], abs=1e-5)
