"""How long a report takes, and how large its page is.

    python benchmarks/report.py [--runs 40] [--steps 400] [--seeds 5]

Writes run directories with records of the size that training writes, five seeds of each setting,
into a temporary folder, and reports on all of them and on one, with stored rollouts. Times are of
`build_report` and of writing the page, the import of the modules included.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moored.config import Config, dump_config
from moored.diagnostics.report import CollapseReport, Regime, Verdict
from moored.runlog.log import RunLog
from moored.runlog.rollouts import write_groups
from moored.runlog.scores import write_scores
from moored.types import Group, Prompt, ScoreMatrix, StopReason, Trajectory, Turn

NUM_PROMPTS = 8


def make_run(
    folder: Path,
    *,
    seed: int = 0,
    value: float = 0.9,
    num_steps: int = 400,
    look_every: int = 5,
    rollouts_every: int = 0,
    collapses: bool = False,
    has_scores: bool = True,
) -> Path:
    """A run directory of synthetic records; success follows a curve, with noise of its seed.

    Scores are shown in the report on a single run only, and take longest to write.
    """
    rng = np.random.default_rng([seed, int(1000 * value)])
    config = Config.model_validate(
        {"seed": seed, "num_steps": num_steps, "filter": {"value": value}}
    )
    log = RunLog(folder)
    log.write_config(dump_config(config))
    log.append("starts", 0, {"command": ["moored", "train", "x"], "versions": {"numpy": "2.0"}})
    for step in range(1, num_steps + 1):
        level = step / num_steps * value
        log.append("metrics", step, _metrics(level, rng))
        log.append("timing", step, {"rollout_s": 1.0 + level, "update_s": 0.5, "collapse_s": 0.1})
        if step == 1 or step % look_every == 0:
            mi = 0.5 * math.exp(-10 * level) if collapses else 0.5 + level
            log.append("collapse", step, _look(step, mi, num_steps, collapses))
            if has_scores:
                views = {"first_turn": _scores(mi), "observation_swap": _scores(mi / 2)}
                write_scores(folder, step, views, every=look_every, num_steps=num_steps)
        if rollouts_every and (step == 1 or step % rollouts_every == 0):
            groups = [_group(number, level, rng) for number in range(NUM_PROMPTS)]
            kept = [number < 3 for number in range(NUM_PROMPTS)]
            write_groups(log.rollouts_file(step), groups, step=step, kept=kept)
    return folder


def _scores(mi: float) -> ScoreMatrix:
    """Scores of 64 reasonings, each `mi` likelier under its own prompt."""
    columns_M = np.arange(64) % NUM_PROMPTS
    logp_MN = np.where(columns_M[:, None] == np.arange(NUM_PROMPTS), -0.8, -0.8 - mi)
    return ScoreMatrix(logp_MN=logp_MN, columns_M=columns_M, blocks_M=np.zeros(64, dtype=int))


def _metrics(level: float, rng: np.random.Generator) -> dict[str, float]:
    noise = float(rng.normal(0, 0.05))
    fillers = {f"learner/figure_{k}": float(x) for k, x in enumerate(rng.normal(size=16))}
    return {
        "rollout/success_rate": min(max(level + noise, 0.0), 1.0),
        "rollout/reward_mean": level + 2 * noise,
        "rollout/validity_rate": 1.0 - abs(noise) / 4,
        "rollout/reply_tokens_mean": 40.0 + 20 * level + 10 * noise,
        "rollout/reward_variance_mean": 5.0 + noise,
        "filter/num_groups": 8.0,
        "filter/num_zero": float(rng.integers(0, 3)),
        "filter/kept_fraction": 0.5,
        **fillers,
    }


def look_report(mi: float, verdict: Verdict = Verdict.HEALTHY) -> CollapseReport:
    """A whole report with a given MI per token."""
    return CollapseReport(
        num_prompts=NUM_PROMPTS,
        num_used_prompts=NUM_PROMPTS,
        num_reasonings=64,
        num_merged_prompts=0,
        num_empty_reasonings=0,
        mi_estimate=mi,
        mi_seq_estimate=10 * mi,
        mi_upper_bound=math.log(NUM_PROMPTS),
        conditional_entropy_est=0.8,
        conditional_entropy_seq_est=8.0,
        reasoning_entropy_est=0.8 + mi,
        reasoning_entropy_seq_est=8.0 + mi,
        matched_log_prob_mean=-0.8,
        marginal_log_prob_mean=-0.8 - mi,
        retrieval_accuracy=min(0.125 + mi / 2, 1.0),
        retrieval_at={2: 0.5, 4: 0.75},
        marginal_std=0.2,
        marginal_std_seq=2.0,
        mi_zscore=mi / 0.2,
        mi_zscore_seq=mi / 0.2,
        marginal_std_ema=0.2,
        marginal_std_ema_seq=2.0,
        mi_zscore_ema=mi / 0.2,
        mi_zscore_ema_seq=mi / 0.2,
        verdict=verdict,
        why="A made-up look.",
        regime=Regime.DIVERSE if verdict is Verdict.HEALTHY else Regime.TEMPLATE_COLLAPSE,
        standard_errors={"mi_estimate": 0.05, "retrieval_accuracy": 0.06},
        p_values={"mi_estimate": 0.001},
    )


def _look(step: int, mi: float, num_steps: int, collapses: bool) -> dict[str, object]:
    """As `train_step` writes it, alarm at the first look after half of the run."""
    is_late = collapses and step > num_steps / 2
    report = look_report(mi, Verdict.COLLAPSED if is_late else Verdict.HEALTHY)
    swap = replace(report, mi_estimate=mi / 2)
    alarm = {
        "step": step,
        "kind": Regime.TEMPLATE_COLLAPSE,
        "mi_level": mi,
        "mi_level_se": 0.05,
        "mi_reference": 0.5,
    }
    judged = {
        "view": "first_turn",
        "verdict": report.verdict,
        "why": report.why,
        "prompts_needed": None,
        "regime": report.regime,
        "alarm": alarm if is_late else None,
        "share_unmeasured": 0.0,
    }
    return {
        "verdict": report.verdict,
        "regime": report.regime,
        "alarm": judged["alarm"],
        "environments": {"sokoban": judged},
        "skipped": {},
        "reports": {"first_turn": report.to_dict(), "observation_swap": swap.to_dict()},
    }


def _group(number: int, level: float, rng: np.random.Generator) -> Group:
    """Eight episodes of two turns on a board of its own."""
    ids = np.arange(4)
    board = "\n".join(["#####", f"#P{'_' * (number % 3)}X#", "#####"])
    trajectories = []
    for episode in range(8):
        solved = bool(rng.random() < level)
        turns = tuple(
            Turn(
                prompt=Prompt(ids),
                completion_ids=ids,
                logprobs=np.zeros(4, dtype=np.float32),
                think_span=None,
                answer_span=None,
                reply=f"<think>Room {number}.</think><answer>Right</answer>",
                seen=f"Turn {turn + 1} of 2.\n{board}",
                reward=(1.0 if solved else -0.1) * turn,
                is_valid=True,
                policy_version=0,
            )
            for turn in range(2)
        )
        trajectories.append(
            Trajectory(
                env="sokoban",
                task_seed=number,
                episode_seed=episode,
                turns=turns,
                stop=StopReason.DONE if solved else StopReason.TURN_LIMIT,
                success=solved,
                metrics={},
            )
        )
    return Group(group_id=number, env="sokoban", task_seed=number, trajectories=tuple(trajectories))


def make_runs(folder: Path, *, runs: int, steps: int, seeds: int) -> list[Path]:
    """`seeds` repeats of each setting."""
    return [
        make_run(
            folder / f"run_{k:02d}",
            seed=k % seeds,
            value=round(0.5 + 0.4 * (k // seeds) / max(runs // seeds, 1), 3),
            num_steps=steps,
            collapses=k % 2 == 1,
            has_scores=False,
        )
        for k in range(runs)
    ]


def measure(runs: Sequence[Path], file: Path) -> dict[str, float]:
    """Seconds and megabytes of the report on these runs."""
    start = time.perf_counter()
    from moored.analysis.report import build_report
    from moored.analysis.report_page import write_report

    report = build_report(runs, command="moored report")
    built = time.perf_counter()
    write_report(file, report)
    return {
        "runs": len(runs),
        "read_s": round(built - start, 2),
        "write_s": round(time.perf_counter() - built, 2),
        "figures": len(report.figures),
        "page_mb": round(file.stat().st_size / 1e6, 2),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time and size of a report.")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        runs = make_runs(folder, runs=chosen.runs, steps=chosen.steps, seeds=chosen.seeds)
        single = make_run(folder / "one", num_steps=chosen.steps, rollouts_every=10)
        for each in (runs, [single]):
            print(json.dumps(measure(each, folder / "report.html")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
