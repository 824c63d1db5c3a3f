"""What a failed step leaves behind."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from moored.errors import MooredError
from moored.training.failures import keep_failure


def test_a_learner_that_cannot_be_asked_any_more_does_not_hide_the_error(tmp_path):
    def damaged_weights():
        raise MooredError("a learner rank died")

    learner = cast(Any, SimpleNamespace(version=3, damaged_weights=damaged_weights))
    told = keep_failure(tmp_path, 7, MooredError("out of memory"), learner, [])
    assert str(told).startswith("step 7: out of memory.")
    kept = json.loads((tmp_path / "failed" / "step_000007" / "failure.json").read_text())
    assert kept["error"] == "out of memory" and kept["weights_not_finite"] is None
