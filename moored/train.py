"""The training loop. `train_step` is one step, read top to bottom; it does not know where it runs.

Everything random derives from (run seed, step), so a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moored.algo import check_filter
from moored.config import Config, dump_config
from moored.diagnostics.monitor import CollapseMonitor, Measurement
from moored.engine.base import ClusterEngine, Engine, Event, HasEvents
from moored.engine.build import build_engine, require_run_packages
from moored.engine.check import check_context
from moored.engine.checkpoint import remove_checkpoints, save_checkpoint
from moored.engine.workers.team import WorkerLost
from moored.envs.mix import EnvMix
from moored.errors import MooredError
from moored.evaluate import Evaluation, evaluate
from moored.models.paths import resolve_paths
from moored.models.rates import with_rates
from moored.recovery import go_back, surviving
from moored.rollout.ahead import Ahead
from moored.rollout.episodes import Task, roll_out
from moored.rollout.pool import EnvCalls, make_pool
from moored.runlog.changes import changes_since
from moored.runlog.log import RunLog, all_done, read_records, written_whole
from moored.runlog.machine import describe_machine, installed_versions, own_command
from moored.runlog.rollouts import write_groups
from moored.runlog.scores import write_scores
from moored.runlog.sinks import RunInfo, Sinks, require_sinks
from moored.training.algorithms import Algorithm, load_algorithm
from moored.training.failures import keep_failure
from moored.training.gradients import check_measures_gradients, measure_gradients
from moored.training.samples import score_groups, select_samples, step_metrics
from moored.training.stopping import LoopState, outcome_free_warning, stop_reason, take_step
from moored.training.update import estimate_advantages, update, with_old_logprobs
from moored.types import Group, Selection

logger = logging.getLogger(__name__)
OUTCOME_FREE = "outcome_free"
"""Kind of the event that says what the first updates consisted of."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything a step needs."""

    config: Config
    algorithm: Algorithm
    mix: EnvMix
    engine: Engine
    monitor: CollapseMonitor
    log: RunLog
    sinks: Sinks = field(default_factory=Sinks)
    pool: EnvCalls[Any] = field(init=False)
    ahead: Ahead = field(init=False)
    state: LoopState = field(default_factory=LoopState)
    next_step: int = 1
    furthest_step: int = 1
    """The largest that `next_step` has been."""
    num_losses: int = 0
    """Times that the run was thrown back since it got there."""
    fresh_monitor: dict[str, Any] = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        self.pool = make_pool(self.engine, rollout)
        self.fresh_monitor = self.monitor.state_dict()
        self.ahead = Ahead(partial(_first_groups, self), max_lag=rollout.max_lag)
        if isinstance(self.engine, HasEvents):
            self.engine.on_event = self.note

    @contextmanager
    def timed(self, phase: str):
        """Add the time of a block to its phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def note(self, event: Event) -> None:
        """Log an event of the run or of an engine process, and warn."""
        self.log.append(
            "events", self.next_step, {"kind": event.kind, "text": event.text, **event.figures}
        )
        logger.warning("step %d: %s", self.next_step, event.text)

    def close(self) -> None:
        """Close environments, what they share, sinks and the engine."""
        with ExitStack() as stack:
            for part in (self.engine, self.sinks, self.pool):
                stack.callback(part.close)
            stack.callback(self.ahead.drop)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did."""

    step: int
    metrics: Mapping[str, float]
    collapse: Measurement | None
    evaluation: Evaluation | None
    seconds: Mapping[str, float]
    gradients: Mapping[str, object] | None = None
    """By reward variance, see `moored.training.gradients`; None when not due."""


def build_run(config: Config, folder: Path, *, resume: bool = False) -> Run:
    """Assemble a run: environments, engine, monitor and run directory."""
    require_sinks(config.log.sinks)
    config = with_rates(resolve_paths(config))
    algorithm = load_algorithm(config.algorithm)
    check_filter(config.filter.score, config.filter.rule)
    mix = EnvMix(config.env)
    mix.check()
    require_run_packages(config)
    check_context(config)
    engine = build_engine(config)
    try:
        if config.gradients.every:
            check_measures_gradients(engine.learner)
        engine.check()
        return Run(
            config=config,
            algorithm=algorithm,
            mix=mix,
            engine=engine,
            monitor=_make_monitor(config, engine, mix),
            log=RunLog(folder, resume=resume),
        )
    except BaseException:
        engine.close()
        raise


def _make_monitor(config: Config, engine: Engine, mix: EnvMix) -> CollapseMonitor:
    return CollapseMonitor(
        score=engine.scorer.score,
        views=config.collapse.views,
        num_pairs=config.collapse.num_pairs,
        num_prompts=_num_prompts(config, mix),
        bootstrap=config.collapse.bootstrap,
        permutations=config.collapse.permutations,
        ema_decay=config.collapse.ema_decay,
        seed=config.seed,
    )


def _num_prompts(config: Config, mix: EnvMix) -> dict[str, int]:
    """N of each environment: fixed over the run, and what every step has of it."""
    fixed, num_groups = config.collapse.num_prompts, config.rollout.num_groups
    if fixed is not None:
        return dict.fromkeys(mix.names, fixed)
    fewest = mix.fewest_groups(num_groups, seed=config.seed)
    return {name: max(2, count) for name, count in zip(mix.names, fewest, strict=True)}


def train_step(run: Run, step: int) -> StepRecord:
    """Roll out, measure, select, update, log."""
    config, learner, run.seconds = run.config, run.engine.learner, {}
    with run.timed("rollout"):
        groups = run.ahead.take(step)
    collapse, gradients = _measure(run, groups, step)
    groups, selection = _select(run, groups, step)
    if step < config.num_steps:
        run.ahead.begin(step + 1)
    if _is_due(step, config.log.rollouts_every):
        with run.timed("log"):
            write_groups(run.log.rollouts_file(step), groups, step=step, kept=selection.group_mask)
    with run.timed("advantages"):
        samples = select_samples(config, groups, selection)
        samples, gap = with_old_logprobs(config.algorithm, learner, samples)
        advantages = estimate_advantages(config, run.algorithm, learner, groups, samples)
    with run.timed("update"):
        stats = update(config, run.algorithm, learner, samples, advantages, selection, step)
    _finish_ahead(run)
    with run.timed("publish"):
        run.engine.publish()
    evaluation = None
    if _is_due(step, config.evaluation.every, last=config.num_steps):
        with run.timed("evaluation"):
            evaluation = _evaluate(run)
    metrics = step_metrics(config.filter, groups, selection, samples, advantages, {**stats, **gap})
    metrics |= {} if evaluation is None else evaluation.metrics()
    record = StepRecord(
        step=step,
        metrics=metrics,
        collapse=collapse,
        gradients=gradients,
        evaluation=evaluation,
        seconds=run.seconds,
    )
    _write(run, record)
    return record


def _first_groups(run: Run, step: int, on_replies: Callable[[int, int], None]) -> list[Group]:
    tasks = _plan(run, step, 0, run.config.rollout.num_groups)
    return _roll_out(run, tasks, step, on_replies)


def _finish_ahead(run: Run) -> None:
    """Wait for the groups of the next step, which need the weights of before this update."""
    with run.timed("rollout"):
        beside_s = run.ahead.wait()
    if beside_s:
        run.seconds["rollout_beside"] = beside_s


def _measure(
    run: Run, groups: Sequence[Group], step: int
) -> tuple[Measurement | None, dict[str, object] | None]:
    """Collapse and gradients, each when due; changes nothing that the step goes on with."""
    collapse, gradients, config = None, None, run.config
    if _is_due(step, config.collapse.every):
        with run.timed("collapse"):
            collapse = run.monitor.measure(step, groups)
    if _is_due(step, config.gradients.every):
        with run.timed("gradients"):
            gradients = measure_gradients(
                config, run.algorithm, run.engine.learner, groups, config.gradients
            )
    return collapse, gradients


def train(run: Run, on_step: Callable[[StepRecord], bool | None] | None = None) -> str:
    """Run to the last step, an early stop, or until `on_step` says True; returns why it ended.

    The policy is then in the run directory, under `model`, in Hugging Face format.
    """
    reason = _train(run, on_step)
    surviving(run, lambda: _export(run))
    if not run.config.keep_checkpoints and run.next_step > run.config.num_steps:
        remove_checkpoints(run.log.path)
    return reason


def _export(run: Run) -> None:
    with written_whole(run.log.path / "model") as folder:
        run.engine.export(folder)


def _train(run: Run, on_step: Callable[[StepRecord], bool | None] | None) -> str:
    if reason := stop_reason(run.config, run.state):
        return reason
    while run.next_step <= run.config.num_steps:
        if reason := surviving(run, lambda: _next_step(run, on_step)):
            return reason
    return all_done(run.config.num_steps)


def _next_step(run: Run, on_step: Callable[[StepRecord], bool | None] | None) -> str:
    """Do one step and what follows it; returns why the run ends there, or an empty text."""
    config, step = run.config, run.next_step
    try:
        record = train_step(run, step)
    except WorkerLost:
        raise
    except MooredError as error:
        tasks = _plan(run, step, 0, config.rollout.num_groups)
        raise keep_failure(run.log.path, step, error, run.engine.learner, tasks) from error
    take_step(config, run.state, record.metrics, run.monitor.alarm)
    _warn_once(run)
    reason = stop_reason(config, run.state)
    run.next_step = step + 1
    is_asked = on_step is not None and on_step(record)
    if is_asked and not reason and step < config.num_steps:
        reason = f"stopped on request after step {step}"
    if reason or step % config.checkpoint_every == 0 or step == config.num_steps:
        checkpoint(run)
    return reason


def _warn_once(run: Run) -> None:
    """Say that updates are mostly outcome-free, unless the run has; its events outlast a kill."""
    text = outcome_free_warning(run.config, run.state)
    if text and all(e["kind"] != OUTCOME_FREE for e in read_records(run.log.path, "events")):
        share = float(np.mean(run.state.first_shares))
        run.note(Event(kind=OUTCOME_FREE, text=text, figures={"outcome_free_share": share}))


def checkpoint(run: Run) -> Path:
    """Save everything `resume` needs."""
    state = {"loop": asdict(run.state), "monitor": run.monitor.state_dict()}
    step, learner = run.next_step - 1, run.engine.learner
    keep = run.config.keep_checkpoints
    return save_checkpoint(run.log.path, step, learner, state, also=run.ahead.save, keep=keep)


def resume(run: Run, *, command: Sequence[str] | None = None) -> None:
    """Go back to the newest checkpoint and forget what was logged after it.

    Options that differ from those of the run are written to its configuration and its log.
    """
    changes = changes_since(run.log.path, run.config)
    lost = go_back(run)
    step = run.next_step - 1
    if lost.num_steps or isinstance(run.engine, ClusterEngine):
        text = f"the driver is back; going on after step {step}, {lost.num_steps} done again"
        run.note(Event(kind="driver_back", text=text, figures=lost.figures(run.config)))
    if changes:
        changed = {name: asdict(change) for name, change in changes.items()}
        run.log.append("changes", step, {"options": changed})
        run.log.write_config(dump_config(run.config))
    _note_start(run, command)
    _open_sinks(run)


def start(run: Run, *, command: Sequence[str] | None = None) -> None:
    """Begin a new run: store its configuration, and the `command` that started it."""
    _note_start(run, command)
    run.log.write_config(dump_config(run.config))
    _open_sinks(run)


def _note_start(run: Run, command: Sequence[str] | None) -> None:
    """Store by which command the run goes on, and with which versions."""
    about = {
        "command": list(command or own_command()),
        "versions": installed_versions(),
        "engine": run.engine.describe(),
        "machine": describe_machine(),
    }
    run.log.append("starts", run.next_step - 1, about)


def _open_sinks(run: Run) -> None:
    info = RunInfo(
        log=run.log,
        project=run.config.log.project,
        config=run.config.model_dump(mode="json"),
        first_step=run.next_step,
    )
    run.sinks.open(run.config.log.sinks, info)


def _is_due(step: int, every: int, *, last: int | None = None) -> bool:
    """On the first step, then every `every` steps, and on the `last`; `every` 0 means never."""
    return every > 0 and (step in (1, last) or step % every == 0)


def _plan(run: Run, step: int, offset: int, count: int) -> list[Task]:
    return plan_tasks(run.config, run.mix, step, count, offset=offset)


def plan_tasks(
    config: Config, mix: EnvMix, step: int, count: int, *, offset: int = 0
) -> list[Task]:
    """The next `count` groups; `offset` counts the groups this step has used already."""
    per_step = config.rollout.num_groups * (1 + config.filter.max_refills)
    tasks = []
    for index in range(offset, offset + count):
        number = (step - 1) * per_step + index
        entry = mix.index_of_group(number, seed=config.seed)
        entropy = np.random.SeedSequence([config.seed, number]).generate_state(1, np.uint64)[0]
        tasks.append(
            Task(
                group_id=number,
                env=mix.names[entry],
                make_env=mix.makers[entry],
                task_seed=int(entropy) % (1 << 40),
                episode_seeds=tuple(range(config.rollout.group_size)),
            )
        )
    return tasks


def _roll_out(
    run: Run,
    tasks: Sequence[Task],
    step: int,
    on_replies: Callable[[int, int], None] | None = None,
) -> list[Group]:
    config = run.config
    return roll_out(
        tasks,
        engine=run.engine,
        options=config.rollout,
        seed=(config.seed, step),
        pool=run.pool,
        on_replies=on_replies,
    )


def _select(run: Run, groups: list[Group], step: int) -> tuple[list[Group], Selection]:
    """Score and select groups; under `refill`, sample new ones for those that were dropped."""
    config = run.config
    with run.timed("filter"):
        selection = score_groups(config.filter, groups)
    used = len(groups)
    for _ in range(config.filter.max_refills if config.filter.action == "refill" else 0):
        missing = config.rollout.num_groups - len(selection.kept)
        if missing <= 0:
            break
        with run.timed("rollout"):
            fresh = _roll_out(run, _plan(run, step, used, missing), step)
        used += missing
        groups = [*groups, *fresh]
        with run.timed("filter"):
            selection = score_groups(config.filter, groups)
    return groups, selection


def _evaluate(run: Run) -> Evaluation:
    return evaluate(run.engine, run.mix, run.config, pool=run.pool)


def _write(run: Run, record: StepRecord) -> None:
    timing = {f"{phase}_s": seconds for phase, seconds in record.seconds.items()}
    if record.collapse is not None:
        run.log.append("collapse", record.step, record.collapse.to_dict())
        write_scores(
            run.log.path,
            record.step,
            record.collapse.scores,
            every=run.config.collapse.every,
            num_steps=run.config.num_steps,
        )
    if record.gradients is not None:
        run.log.append("gradients", record.step, record.gradients)
    run.log.append("timing", record.step, timing)
    run.log.append("metrics", record.step, record.metrics)
    if run.config.log.sinks:
        looks = {} if record.collapse is None else record.collapse.metrics
        run.sinks.log(record.step, {**record.metrics, **looks, **timing})
