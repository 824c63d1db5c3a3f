"""The training loop. `train_step` is one step, read top to bottom; it never asks where it runs.

Everything random derives from (run seed, step), so a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from moored.algo import loss_scale, select_groups
from moored.algorithms import (
    Algorithm,
    overlong_penalty,
    set_gae_advantages,
    set_group_advantages,
)
from moored.batch import Sample, build_samples, set_weights
from moored.config import Config, dump_config
from moored.diagnostics.monitor import CollapseMonitor, Measurement
from moored.engine.base import Learner, Sampler, SamplingParams
from moored.engine.checkpoint import load_checkpoint, save_checkpoint
from moored.envs.mix import EnvMix
from moored.errors import MooredError
from moored.evaluate import Evaluation, evaluate
from moored.render import Renderer
from moored.rollout import EnvPool, Task, roll_out
from moored.runlog import RunLog
from moored.step_metrics import step_metrics
from moored.stopping import LoopState, stop_reason
from moored.types import Group, Selection


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything a step needs."""

    config: Config
    algorithm: Algorithm
    mix: EnvMix
    renderer: Renderer
    sampler: Sampler
    learner: Learner
    monitor: CollapseMonitor
    log: RunLog
    pool: EnvPool = field(default_factory=EnvPool)
    state: LoopState = field(default_factory=LoopState)
    next_step: int = 1
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str):
        """Add the time of a block to its phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did."""

    step: int
    metrics: Mapping[str, float]
    collapse: Measurement | None
    evaluation: Evaluation | None
    seconds: Mapping[str, float]


def train_step(run: Run, step: int) -> StepRecord:
    """Roll out, measure, select, update, log."""
    config, run.seconds = run.config, {}
    with run.timed("rollout"):
        groups = _roll_out(run, _plan(run, step, 0, config.rollout.num_groups), step)
    collapse = None
    if _is_due(step, config.collapse.every):
        with run.timed("collapse"):
            collapse = run.monitor.measure(step, groups)
    with run.timed("rollout"):
        groups, selection = _select(run, groups, step)
    with run.timed("advantages"):
        samples = _samples(run, groups, selection)
    with run.timed("update"):
        stats = _update(run, samples, selection, step)
    with run.timed("weights"):
        run.sampler.load_weights(run.learner.weights(), run.learner.version)
    evaluation = None
    if _is_due(step, config.evaluation.every) or (
        config.evaluation.every and step == config.num_steps
    ):
        with run.timed("evaluation"):
            evaluation = _evaluate(run)
    metrics = step_metrics(groups, selection, samples, stats, evaluation)
    record = StepRecord(
        step=step, metrics=metrics, collapse=collapse, evaluation=evaluation, seconds=run.seconds
    )
    _write(run, record)
    return record


def train(run: Run, on_step: Callable[[StepRecord], bool | None] | None = None) -> str:
    """Run to the last step, an early stop, or until `on_step` says True; returns why it ended."""
    config = run.config
    for step in range(run.next_step, config.num_steps + 1):
        record = train_step(run, step)
        reason = stop_reason(config, run.state, record.metrics, record.evaluation)
        run.next_step = step + 1
        if on_step is not None and on_step(record) and not reason:
            reason = f"stopped on request after step {step}"
        if reason or step % config.checkpoint_every == 0 or step == config.num_steps:
            checkpoint(run)
        if reason:
            return reason
    return f"all {config.num_steps} steps done"


def checkpoint(run: Run) -> Path:
    """Save everything `resume` needs."""
    state = {"loop": asdict(run.state), "monitor": run.monitor.state_dict()}
    return save_checkpoint(run.log.path, run.next_step - 1, run.learner, state)


def resume(run: Run) -> None:
    """Go back to the newest checkpoint and forget what was logged after it."""
    saved = load_checkpoint(run.log.path, run.learner)
    step = 0 if saved is None else int(saved["step"])
    if saved is not None:
        run.state = LoopState(**saved["loop"])
        run.monitor.load_state_dict(saved["monitor"])
        run.sampler.load_weights(run.learner.weights(), run.learner.version)
    run.next_step = step + 1
    run.log.rewind(step)


def start(run: Run) -> None:
    """Begin a new run: store its configuration."""
    run.log.write_config(dump_config(run.config))


def _is_due(step: int, every: int) -> bool:
    """On the first step and then every `every` steps; 0 means never."""
    return every > 0 and (step == 1 or step % every == 0)


def _plan(run: Run, step: int, offset: int, count: int) -> list[Task]:
    """The next `count` groups; `offset` counts the groups this step has used already."""
    config = run.config
    per_step = config.rollout.num_groups * (1 + config.filter.max_refills)
    tasks = []
    for index in range(offset, offset + count):
        number = (step - 1) * per_step + index
        spec = run.mix.spec_of_group(number, seed=config.seed)
        entropy = np.random.SeedSequence([config.seed, number]).generate_state(1, np.uint64)[0]
        tasks.append(
            Task(
                group_id=number,
                env=spec.name,
                make_env=spec.make,
                task_seed=int(entropy) % (1 << 40),
                episode_seeds=tuple(range(config.rollout.group_size)),
            )
        )
    return tasks


def _roll_out(run: Run, tasks: Sequence[Task], step: int) -> list[Group]:
    config = run.config
    return roll_out(
        tasks,
        sampler=run.sampler,
        renderer=run.renderer,
        params=SamplingParams(
            max_tokens=config.rollout.max_response_tokens,
            temperature=config.rollout.temperature,
            stop_ids=run.renderer.stop_ids,
        ),
        max_context=config.max_context,
        seed=(config.seed, step),
        pool=run.pool,
    )


def _select(run: Run, groups: list[Group], step: int) -> tuple[list[Group], Selection]:
    """Score and select groups; under `refill`, sample new ones for those that were dropped."""
    config = run.config
    selection = _score(config, groups)
    used = len(groups)
    for _ in range(config.filter.max_refills if config.filter.action == "refill" else 0):
        missing = config.rollout.num_groups - len(selection.kept)
        if missing <= 0:
            break
        fresh = _roll_out(run, _plan(run, step, used, missing), step)
        used += missing
        groups = [*groups, *fresh]
        selection = _score(config, groups)
    return groups, selection


def _score(config: Config, groups: Sequence[Group]) -> Selection:
    rewards = [group.rewards for group in groups]
    options = config.filter
    return select_groups(
        np.concatenate(rewards),
        np.repeat(np.arange(len(groups)), [len(r) for r in rewards]),
        score=options.score,
        ddof=options.ddof,
        rule=options.rule,
        value=options.value,
        eps=options.eps,
        largest=options.largest,
        keep_zero=options.keep_zero,
    )


def _samples(run: Run, groups: Sequence[Group], selection: Selection) -> list[Sample]:
    """Samples of the groups that are trained on, with their advantages."""
    config = run.config
    keeps_all = config.filter.action in ("mask", "soft")
    samples = build_samples(groups)
    if not keeps_all:
        samples = [s for s in samples if selection.group_mask[s.group]]
    if not samples or not len(selection.kept):
        return []
    if run.algorithm.group_advantage is None:
        set_gae_advantages(samples, run.learner.values(samples), config.algorithm)
        return samples
    rewards = np.concatenate([_shaped_rewards(config, group) for group in groups])
    ids = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    set_group_advantages(samples, rewards, ids, run.algorithm.group_advantage)
    return samples


def _shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """Rewards less the penalty for overlong replies."""
    longest, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    penalties = [
        sum(overlong_penalty(len(turn.completion_ids), longest, buffer) for turn in t.turns)
        for t in group.trajectories
    ]
    return group.rewards + np.array(penalties)


def _update(run: Run, samples: list[Sample], selection: Selection, step: int) -> dict[str, float]:
    """Minibatch updates; the same number of them whatever the filter kept."""
    config = run.config
    if not samples:
        return {}
    rng = np.random.default_rng([config.seed, step])
    totals: dict[str, list[float]] = {}
    for _ in range(config.optimizer.num_epochs):
        order = rng.permutation(len(samples))
        for part in np.array_split(order, min(config.optimizer.num_minibatches, len(samples))):
            minibatch = [samples[i] for i in part]
            _weigh(run, minibatch, selection)
            stats = run.learner.step(minibatch)
            _check_finite(run, stats, step)
            for name, value in stats.items():
                totals.setdefault(name, []).append(value)
    return {f"learner/{name}": float(np.mean(values)) for name, values in totals.items()}


def _weigh(run: Run, minibatch: Sequence[Sample], selection: Selection) -> None:
    """Token weights of one update: aggregation, loss scale, the filter's soft or mask action."""
    config = run.config
    scale = loss_scale(selection.kept_fraction, config.filter.loss_scale)
    how = config.algorithm.aggregation or run.algorithm.aggregation
    masked = config.filter.action == "mask"
    counted = [s for s in minibatch if not masked or selection.group_mask[s.group]]
    set_weights(counted, how, max_length=config.rollout.max_response_tokens, scale=scale)
    for sample in minibatch:
        if masked and not selection.group_mask[sample.group]:
            sample.weights_T = np.zeros(len(sample.ids_T))
        if config.filter.action == "soft":
            sample.weights_T = sample.weights_T * selection.weights[sample.group]


def _check_finite(run: Run, stats: Mapping[str, float], step: int) -> None:
    bad = [name for name, value in stats.items() if not np.isfinite(value)]
    if bad:
        run.log.append("metrics", step, {"error": f"not finite: {', '.join(bad)}", **stats})
        raise MooredError(
            f"step {step}: {', '.join(bad)} is not finite, so the run stopped before the update; "
            f"its numbers are the last line of {str(run.log.path / 'metrics.jsonl')!r}. Lower "
            f"optimizer.lr or optimizer.grad_clip and resume"
        )


def _evaluate(run: Run) -> Evaluation:
    config = run.config
    return evaluate(
        run.mix,
        sampler=run.sampler,
        renderer=run.renderer,
        params=SamplingParams(
            max_tokens=config.rollout.max_response_tokens,
            temperature=config.evaluation.temperature,
            stop_ids=run.renderer.stop_ids,
        ),
        max_context=config.max_context,
        num_tasks=config.evaluation.num_tasks,
        seed=config.seed,
        pool=run.pool,
    )


def _write(run: Run, record: StepRecord) -> None:
    if record.collapse is not None:
        found = record.collapse
        run.log.append(
            "collapse",
            record.step,
            {
                **found.metrics,
                "regime": found.regime,
                "skipped": dict(found.skipped),
                "alarm": None if found.alarm is None else asdict(found.alarm),
                "reports": {name: report.to_dict() for name, report in found.reports.items()},
            },
        )
    run.log.append("timing", record.step, {f"{k}_s": v for k, v in record.seconds.items()})
    run.log.append("metrics", record.step, record.metrics)
