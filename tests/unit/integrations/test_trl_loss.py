"""What TRL divides a loss by, and the factors that follow."""

from __future__ import annotations

import re

import numpy as np
import pytest

from moored.errors import MooredError
from moored.integrations.trl_loss import LossFactors, check_loss_mean, loss_factors, own_loss_mean


class Base:
    def compute_loss(self):
        return self._compute_loss()

    def _compute_loss(self):
        return 1.0


class Wrapper(Base):
    def compute_loss(self):
        return super().compute_loss()


class Another(Base):
    def _compute_loss(self):
        return 2.0


def test_loss_factors_are_worked_out_from_kept_rows():
    # Two processes, two micro-batches of 4 rows: 6 of 16 rows kept, 3 of 4 micro-batches used.
    kept_rows_WS = np.array([[4, 1], [0, 1]])
    assert loss_factors("rows", kept_rows_WS, 4) == LossFactors(16 / 6, 4 / 3)
    assert loss_factors("micro_batch", kept_rows_WS, 4) == LossFactors(4 / 3, 4 / 3)
    assert loss_factors("generation", kept_rows_WS, 4) == LossFactors(1.0, 4 / 3)
    assert loss_factors("rows", np.zeros((2, 2), dtype=int), 4) == LossFactors()


def test_a_trainer_that_calls_on_keeps_the_loss_of_its_base():
    assert own_loss_mean(Wrapper, Base, Wrapper) is None


@pytest.mark.parametrize("bases", [(Wrapper, Another), (Another, Wrapper)])
def test_a_loss_of_its_own_is_refused_with_the_three_ways_to_say_what_it_is(bases):
    mixed = type("Mixed", bases, {})
    message = "Another overrides _compute_loss, so `loss_type` does not tell"
    with pytest.raises(MooredError, match=re.escape(message)) as error:
        own_loss_mean(mixed, Base, Wrapper)
    assert all(f"'{mean}'" in str(error.value) for mean in ("rows", "micro_batch", "generation"))


def test_a_misspelt_mean_is_refused():
    with pytest.raises(MooredError, match="unknown loss_mean 'row'; did you mean 'rows'"):
        check_loss_mean("row")
