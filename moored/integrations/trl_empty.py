"""Updates and generations of a TRL run that have nothing to train on."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from moored.errors import MooredError

logger = logging.getLogger(__name__)


class EmptyUpdates(TrainerCallback):
    """Skips updates without a loss token; warns of generations that have none, or ends training.

    Generations are counted, not updates: one generation may serve several.
    """

    def __init__(self, trainer: Any, *, max_in_a_row: int, stop: bool, skip: bool) -> None:
        if max_in_a_row < 1:
            raise MooredError(f"max_empty_generations must be at least 1, got {max_in_a_row}")
        self._trainer = trainer
        self._max_in_a_row = max_in_a_row
        self._stop = stop
        self._skip = skip
        self.num_tokens = 0
        """Loss tokens of all processes since the last update."""
        self.num_in_a_row = 0
        self._num_generations = 0
        self._num_empty = 0
        self._is_told = False

    def count_generation(self, *, is_empty: bool) -> None:
        self.num_in_a_row = self.num_in_a_row + 1 if is_empty else 0
        self._num_generations += 1
        self._num_empty += is_empty

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_tokens, self._num_generations, self._num_empty = 0, 0, 0
        self._is_told = False
        if state.global_step == 0:  # a resumed run has loaded its count
            self.num_in_a_row = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_empty = self.num_tokens == 0
        self.num_tokens = 0
        self._trainer._record({"update/is_empty": is_empty})
        if is_empty and self._skip:
            # Zero gradients would still let momentum and weight decay move the weights.
            self._trainer.model.zero_grad(set_to_none=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.num_in_a_row < self._max_in_a_row:
            return
        if self._stop:
            control.should_training_stop = True
        if not self._is_told and state.is_world_process_zero:
            logger.warning(
                "%d generations in a row had nothing to train on: no group with reward variance, "
                "or no loss token in those; training %s",
                self.num_in_a_row,
                "stops" if self._stop else "goes on (stop_when_empty=True would end it)",
            )
        self._is_told = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_told and state.is_world_process_zero:
            logger.warning(
                "%d of %d generations had nothing to train on",
                *(self._num_empty, self._num_generations),
            )
