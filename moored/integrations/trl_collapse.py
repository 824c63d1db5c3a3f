"""Collapse metrics on the model of TRL's `GRPOTrainer`, and an alarm for any `Trainer`.

Every few steps the first replies of all processes are cross-scored by the trainer's own model, each
process scoring its share, and the numbers go into the trainer's own metrics.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object  # pyright: ignore[reportMissingImports]
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

from moored.diagnostics.look import Measurement
from moored.diagnostics.monitor import CollapseMonitor
from moored.diagnostics.report import Verdict
from moored.diagnostics.watch import CollapseWatch
from moored.errors import MooredError
from moored.integrations.completions import group_completions, reasoning_after
from moored.integrations.trl_scoring import score_continuations
from moored.reply import THINK_TAGS, Tags
from moored.types import ScoreRequest, Span

Init = TypeVar("Init", bound=Callable[..., None])
logger = logging.getLogger(__name__)

STATE_FILE = "moored_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseOptions:
    """How often and how collapse is measured."""

    every: int = 5
    """Optimiser steps between looks; the first generation is always measured."""
    num_pairs: int = 64
    num_prompts: int | None = None
    """Fix it, so that curves can be compared: the ceiling of MI is log N."""
    think_tags: Tags | None = THINK_TAGS
    """Where the reasoning lies; None takes the whole first reply."""
    batch_size: int | None = None
    """Rows in one scoring forward; None takes `per_device_train_batch_size`."""
    stop_on_alarm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise MooredError(f"every must be at least 1 step, got {self.every}")


def shows_parameters_of(base: Callable[..., None]) -> Callable[[Init], Init]:
    """Decorator of an `__init__`: its signature is that of `base` and its own keywords."""

    def decorate(init: Init) -> Init:
        own = inspect.signature(init).parameters.values()
        keywords = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
        theirs = inspect.signature(base).parameters.values()
        init.__signature__ = inspect.Signature([*theirs, *keywords])  # pyright: ignore[reportFunctionMemberAccess]
        return init

    return decorate


class WatchedGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` that measures collapse on its own model when given `collapse` options."""

    model: Any
    accelerator: Any
    processing_class: Any

    @shows_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args: Any, collapse: CollapseOptions | None = None, **kwargs: Any) -> None:
        if args:
            args = (_embedded(args[0]), *args[1:])
        elif "model" in kwargs:
            kwargs["model"] = _embedded(kwargs["model"])
        super().__init__(*args, **kwargs)
        self.collapse_options = collapse or CollapseOptions()
        self.collapse_monitor: CollapseMonitor | None = None
        self._measured_at: int | None = None
        if collapse is None:
            return
        self._looks = _Looks(self)
        self.add_callback(self._looks)
        self.collapse_monitor = CollapseMonitor(
            score=self.score,
            views=("first_turn",),
            num_pairs=collapse.num_pairs,
            num_prompts=collapse.num_prompts,
            seed=collapse.seed,
        )
        self.add_callback(AlarmCallback(self.collapse_monitor, stop=collapse.stop_on_alarm))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self.collapse_monitor is not None and self.model.training:
            self._measure_collapse(batch, self.collapse_monitor)
        return batch

    def _record(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(float(value))

    def _measure_collapse(self, batch: dict[str, Any], monitor: CollapseMonitor) -> None:
        """Cross-score the first replies of all processes, every `every` steps."""
        step, every = self.state.global_step + 1, self.collapse_options.every
        if self._measured_at is not None and step // every == self._measured_at // every:
            return
        self._measured_at = step
        if any(gather_object(["pixel_values" in batch])):
            self._looks.count(step, "prompts hold images")
            self._record({"collapse/num_skipped_views": 1.0})
            return
        begin = time.perf_counter()
        rows = gather_object(self._first_replies(batch))
        prompts, replies, spans = zip(*rows, strict=True)
        with _evaluating(self.model):
            found = monitor.measure(step, group_completions(prompts, replies, spans))
        self._looks.count(step, next(iter(found.skipped.values()), None))
        alarm = {"collapse/alarm": float(found.alarm is not None)}
        seconds = {"collapse/measure_s": time.perf_counter() - begin}
        self._record({**found.metrics, **self._looks.judge(found), **alarm, **seconds})

    def _first_replies(self, batch: dict[str, Any]) -> list[tuple[list[int], list[int], Any]]:
        """Prompt, first reply and its reasoning span, of every row of this process."""
        rows = []
        written = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
        # Padding of `tool_mask` is 1, so a 0 is the first token that a tool or a user wrote.
        own = batch["completion_mask"] * written.cumprod(dim=1)
        for index in range(len(own)):
            prompt = batch["prompt_ids"][index][batch["prompt_mask"][index].bool()].tolist()
            reply = batch["completion_ids"][index][own[index].bool()].tolist()
            rows.append((prompt, reply, self._reasoning(prompt, reply)))
        return rows

    def _reasoning(self, prompt: list[int], reply: list[int]) -> Span | None:
        tags = self.collapse_options.think_tags
        if tags is None:
            return 0, len(reply) - (len(reply) > 0 and reply[-1] in self.eos_token_ids)
        return reasoning_after(prompt, reply, self._decode, tags)

    def _decode(self, ids: list[int]) -> str:
        return self.processing_class.decode(ids, clean_up_tokenization_spaces=False)

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        """Log-prob of every continuation token on the trainer's model: a `ScoreFn`.

        Every process must call it, with the same arguments; each scores an equal share of requests.
        """
        num_processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        # Sharded models need the same forwards on every process, so shares are filled up.
        filler = [requests[0]] * (-len(requests) % num_processes)
        mine = [*requests, *filler][rank::num_processes]
        with torch.no_grad(), self.accelerator.autocast():
            scored = [self._score_one(request) for request in mine]
        shares = [scored] if num_processes == 1 else gather_object([scored])
        return [shares[k % num_processes][k // num_processes] for k in range(len(requests))]

    def _score_one(self, request: ScoreRequest) -> list[np.ndarray]:
        batch_size = self.collapse_options.batch_size or self.args.per_device_train_batch_size
        return score_continuations(
            self.model,
            request.prompt.ids,
            request.continuations,
            batch_size=batch_size,
            device=self.accelerator.device,
        )

    def _state(self) -> dict[str, Any]:
        """What a resumed run needs; plain JSON."""
        if self.collapse_monitor is None:
            return {}
        return {
            "monitor": self.collapse_monitor.state_dict(),
            "measured_at": self._measured_at,
            "is_collapsed": self._looks.is_collapsed,
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        if self.collapse_monitor is not None and "monitor" in state:
            self.collapse_monitor.load_state_dict(state["monitor"])
            self._measured_at = state["measured_at"]
            self._looks.is_collapsed = state["is_collapsed"]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            (folder / STATE_FILE).write_text(json.dumps(self._state()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and Path(checkpoint, STATE_FILE).exists():
            self._load_state(json.loads(Path(checkpoint, STATE_FILE).read_text(encoding="utf-8")))


def _embedded(model: Any) -> Any:
    """The folder of a model that ships with the package, by its name; else what was given."""
    if not isinstance(model, str) or not model.isidentifier() or Path(model).exists():
        return model
    folder = files("moored.models") / model
    return str(folder) if (folder / "config.json").is_file() else model


class _Looks(TrainerCallback):
    """Tells what looks say: a new collapse at once; looks that failed at first and at the end."""

    def __init__(self, trainer: WatchedGRPOTrainer) -> None:
        self._trainer = trainer
        self._num_looks = 0
        self._num_unmeasured = 0
        self.is_collapsed = False
        """By the last verdict that could tell."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._num_looks = self._num_unmeasured = 0
        if state.global_step == 0:  # a resumed run has loaded where it stopped
            self._trainer._measured_at = None
            self.is_collapsed = False

    def judge(self, found: Measurement) -> dict[str, float]:
        """Take in a look; returns its verdict as numbers."""
        verdict, look = found.verdict, found.worst
        if look is not None and verdict is Verdict.COLLAPSED and not self.is_collapsed:
            self._warn("%s at step %d: %s", verdict, found.step, look.why)
        if verdict is not Verdict.CANNOT_TELL:
            self.is_collapsed = verdict is Verdict.COLLAPSED
        return {
            "collapse/is_healthy": float(verdict is Verdict.HEALTHY),
            "collapse/is_collapsed": float(verdict is Verdict.COLLAPSED),
        }

    def count(self, step: int, reason: str | None) -> None:
        """Take in one look, and why it could not be made."""
        self._num_looks += 1
        self._num_unmeasured += reason is not None
        if reason is not None and self._num_unmeasured == 1:
            self._warn(
                "collapse is not measured at step %d: %s (further looks like this are counted)",
                *(step, reason),
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._num_unmeasured > 1:
            self._warn(
                "collapse could not be measured in %d of %d looks",
                *(self._num_unmeasured, self._num_looks),
            )

    def _warn(self, message: str, *values: object) -> None:
        if self._trainer.accelerator.is_main_process:
            logger.warning(message, *values)


class AlarmCallback(TrainerCallback):
    """Warns when the alarm of a monitor or a watch goes off, and ends training if `stop`.

    For any transformers `Trainer` whose loop feeds the monitor on every process.
    """

    def __init__(self, monitor: CollapseMonitor | CollapseWatch, *, stop: bool = False) -> None:
        self.monitor = monitor
        self.stop = stop
        self._is_told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # An alarm that was loaded from a checkpoint has been reported before.
        self._is_told = self.monitor.alarm is not None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        alarm = self.monitor.alarm
        if alarm is None or self._is_told:
            return
        self._is_told = True
        if state.is_world_process_zero:
            logger.warning(
                "%s at step %d: MI fell to %.3g from %.3g nats per token%s",
                *(alarm.kind, alarm.step, alarm.mi_level, alarm.mi_reference),
                "; training stops" if self.stop else "",
            )
        if self.stop:
            control.should_training_stop = True


@contextmanager
def _evaluating(model: Any):
    """Without dropout and gradient checkpointing; scoring then draws no random numbers."""
    model.eval()
    try:
        yield
    finally:
        model.train()
