"""The loop of a warm start: dialogues in, a model in Hugging Face format out.

`sft_step` is one step. Dialogues are numbered and updates deterministic, so a run that was killed
ends with the same weights as one that was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moored.engine.base import Engine
from moored.engine.build import build_engine
from moored.engine.checkpoint import load_checkpoint, save_checkpoint
from moored.envs.mix import EnvMix
from moored.errors import ConfigError, MooredError
from moored.evaluate import evaluate
from moored.models.paths import resolve_paths
from moored.rollout.pool import EnvCalls, make_pool
from moored.runlog.log import RunLog, all_done, written_whole
from moored.runlog.machine import describe_machine, installed_versions, own_command
from moored.sft.ahead import LessonsAhead, num_workers
from moored.sft.changes import changes_since, noted_dialogues
from moored.sft.options import (
    SftConfig,
    dump_sft_config,
    engine_config,
    settle,
)
from moored.sft.samples import (
    Batch,
    Lessons,
    OwnLessons,
    ReplyRenderer,
    about_context,
    encode,
    next_batch,
    weighted,
)
from moored.sft.source import Source, open_source
from moored.training.update import lr_factor
from moored.types import ScoreRequest

LOGGED = ("entropy", "grad_norm", "lr")
"""Statistics of an update besides the loss; others compare with an older policy."""

logger = logging.getLogger(__name__)


@runtime_checkable
class KnowsLength(Protocol):
    """An engine that says how long a dialogue its model can be taught."""

    @property
    def exact_limit(self) -> int | None: ...


@dataclass(slots=True, kw_only=True)
class SftRun:
    """Everything a step needs."""

    config: SftConfig
    """Settled: with a learning rate and a context."""
    engine: Engine
    renderer: ReplyRenderer
    source: Source
    lessons: Lessons
    """What the updates learn from, from this process or from others that work ahead."""
    mix: EnvMix
    """What the model is tried on."""
    log: RunLog
    pool: EnvCalls[Any]
    on_replies: Callable[[int, int], None] | None = None
    """Called while the model is tried, with the numbers of replies and of running episodes."""
    next_step: int = 1
    next_index: int = 0
    """The first dialogue that no update has seen yet."""

    def close(self) -> None:
        """End the processes that play dialogues; close environments and the engine."""
        with ExitStack() as stack:
            for part in (self.engine, self.source, self.pool, self.lessons):
                stack.callback(part.close)

    @property
    def max_context(self) -> int:
        assert self.config.max_context is not None
        return self.config.max_context


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRecord:
    """What one step did; step 0 is the measurement before the first."""

    step: int
    metrics: Mapping[str, float]
    seconds: float


def build_sft(config: SftConfig, folder: Path, *, resume: bool = False) -> SftRun:
    """Assemble a run: dialogues first, because a mistake there is found in no time."""
    config = settle(resolve_paths(config))
    with ExitStack() as stack:
        source = open_source(config)
        stack.callback(source.close)
        settings = engine_config(config)
        engine = build_engine(settings)
        stack.callback(engine.close)
        renderer = engine.renderer
        if not isinstance(renderer, ReplyRenderer):
            raise MooredError(
                f"the renderer of engine {config.engine.kind!r} has no reply_ids, which says how a "
                f"model writes a reply; use engine.kind=local"
            )
        _check_context(config, engine)
        engine.check()
        lessons = _open_lessons(config, source, renderer)
        stack.callback(lessons.close)
        run = SftRun(
            config=config,
            engine=engine,
            renderer=renderer,
            source=source,
            lessons=lessons,
            mix=EnvMix(config.env),
            log=RunLog(folder, resume=resume),
            pool=make_pool(engine, settings.rollout),
        )
        stack.pop_all()
    return run


def _open_lessons(config: SftConfig, source: Source, renderer: ReplyRenderer) -> Lessons:
    count = num_workers(config, renderer)
    if count:
        return LessonsAhead(config, count)
    assert config.max_context is not None
    return OwnLessons(source, renderer, config.max_context)


def _check_context(config: SftConfig, engine: Engine) -> None:
    """The models whose context is known only once they are loaded."""
    longest = _longest(engine)
    if longest is not None and (config.max_context or 0) > longest:
        raise ConfigError(
            f"max_context = {config.max_context} is longer than the {longest} tokens that model "
            f"{config.model!r} was made for, or that its layers look back; set it to {longest} or "
            f"less"
        )


def _longest(engine: Engine) -> int | None:
    return engine.exact_limit if isinstance(engine, KnowsLength) else None


def start_sft(run: SftRun) -> None:
    """Begin a new run: store its configuration, and what it was started with."""
    _note_start(run)
    run.log.write_config(dump_sft_config(run.config))


def resume_sft(run: SftRun) -> int:
    """Go back to the newest checkpoint and forget what was logged after it: so many steps.

    Options that differ from those of the run are written to its configuration and its log.
    """
    changes = changes_since(run.log.path, run.config)
    saved = load_checkpoint(run.log.path, run.engine.learner)
    if saved is not None:
        run.next_step, run.next_index = int(saved["step"]) + 1, int(saved["next_index"])
        run.engine.publish()
    # Without a checkpoint, the measurement before the first step is made again too.
    num_lost, _ = run.log.rewind(run.next_step - 1 if saved is not None else -1)
    if changes:
        changed = {name: asdict(change) for name, change in changes.items()}
        run.log.append("changes", run.next_step - 1, {"options": changed})
        run.log.write_config(dump_sft_config(run.config))
    _note_start(run)
    return num_lost


def _note_start(run: SftRun) -> None:
    """Store by which command the run goes on, with which versions, and what it learns."""
    about = {
        "command": own_command(),
        "versions": installed_versions(),
        "engine": run.engine.describe(),
        "machine": describe_machine(),
        **noted_dialogues(run.config),
    }
    run.log.append("starts", run.next_step - 1, about)


def run_sft(run: SftRun, on_step: Callable[[SftRecord], bool | None] = lambda record: None) -> str:
    """Run to the last step, or until `on_step` says True; returns why it ended.

    If a step was done, the model is then in the run directory, under `model`, in Hugging Face
    format.
    """
    reason = _run_steps(run, on_step)
    if run.next_step == 1:
        return reason
    with written_whole(run.log.path / "model") as folder:
        run.engine.export(folder)
    return reason


def _run_steps(run: SftRun, on_step: Callable[[SftRecord], bool | None]) -> str:
    config = run.config
    if run.next_step <= config.num_steps:
        # Processes start and play while this one measures the model.
        run.lessons.begin(run.next_index)
    if run.next_step == 1 and on_step(_measure_before(run)):
        return "stopped on request before the first step"
    for step in range(run.next_step, config.num_steps + 1):
        record = sft_step(run, step)
        run.next_step = step + 1
        is_asked = bool(on_step(record)) and step < config.num_steps
        if is_asked or step % config.checkpoint_every == 0 or step == config.num_steps:
            state = {"next_index": run.next_index}
            save_checkpoint(run.log.path, step, run.engine.learner, state)
        if is_asked:
            return f"stopped on request after step {step}"
    return all_done(config.num_steps)


def _measure_before(run: SftRun) -> SftRecord:
    begin = time.perf_counter()
    metrics = measure(run)
    run.log.append("metrics", 0, metrics)
    return SftRecord(step=0, metrics=metrics, seconds=time.perf_counter() - begin)


def sft_step(run: SftRun, step: int) -> SftRecord:
    """Take the next dialogues, update, measure when due, log."""
    config, begin = run.config, time.perf_counter()
    seconds: dict[str, float] = {}
    batch = next_batch(
        run.lessons,
        run.next_index,
        batch_tokens=config.batch_tokens,
        max_context=run.max_context,
        limit=_longest(run.engine),
    )
    seconds["dialogues_s"] = time.perf_counter() - begin
    factor = lr_factor(
        step,
        config.num_steps,
        schedule=config.optimizer.schedule,
        warmup_steps=config.optimizer.warmup_steps,
        min_ratio=config.optimizer.min_lr_ratio,
    )
    (stats,) = run.engine.learner.step([weighted(batch.samples)], lr_factor=factor)
    if not all(map(math.isfinite, stats.values())):
        raise MooredError(
            f"step {step}: the loss or its gradient is not finite, so the update was not made; "
            f"lower optimizer.lr and start again"
        )
    seconds["update_s"] = time.perf_counter() - begin - seconds["dialogues_s"]
    run.next_index = batch.next_index
    metrics = _step_metrics(batch, stats)
    every = config.evaluation.every
    if step == config.num_steps or (every and step % every == 0):
        run.engine.publish()
        metrics |= measure(run)
    seconds["step_s"] = time.perf_counter() - begin
    run.log.append("timing", step, seconds)
    run.log.append("metrics", step, metrics)
    return SftRecord(step=step, metrics=metrics, seconds=seconds["step_s"])


def _step_metrics(batch: Batch, stats: Mapping[str, float]) -> dict[str, float]:
    return {
        "train/loss": stats["policy_loss"],
        **{f"train/{name}": stats[name] for name in LOGGED},
        "train/num_dialogues": float(batch.num_dialogues),
        "train/num_cut": float(batch.num_cut),
        "train/num_tokens": float(batch.num_tokens),
        "train/num_reply_tokens": float(sum(s.num_loss_tokens for s in batch.samples)),
    }


def measure(run: SftRun) -> dict[str, float]:
    """Held-out loss, and validity and success on validation tasks, as far as asked for."""
    metrics: dict[str, float] = {}
    if run.source.num_held_out:
        loss = held_out_loss(run)
        if math.isnan(loss):
            logger.warning(
                "there is no held-out loss: no reply of the held-out dialogues fits into %s",
                about_context(run.max_context, _longest(run.engine)),
            )
        else:
            metrics["evaluation/loss"] = loss
    elif run.config.evaluation.num_dialogues:
        logger.warning(
            "there is no held-out loss: all dialogues are the same, so none can be left to test on"
        )
    if run.config.env and run.config.evaluation.num_tasks:
        config, see = engine_config(run.config), run.on_replies
        found = evaluate(run.engine, run.mix, config, pool=run.pool, on_replies=see)
        metrics |= found.metrics()
    return metrics


def held_out_loss(run: SftRun) -> float:
    """Mean negative log-probability of the reply tokens of dialogues that are not learnt from.

    NaN where none of them fits into the context.
    """
    dialogues = map(run.source.held_out, range(run.source.num_held_out))
    samples = [s for d in dialogues for s in encode(run.renderer, d, run.max_context)]
    if not samples:
        return math.nan
    scored = run.engine.scorer.score(
        [ScoreRequest(s.prompt, [s.ids_T], [s.images]) for s in samples]
    )
    pairs = zip(samples, scored, strict=True)
    return -float(np.mean(np.concatenate([logp[s.loss_mask_T] for s, (logp,) in pairs])))
