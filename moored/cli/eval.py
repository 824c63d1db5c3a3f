"""`moored eval`: success of a run, a model, or what an endpoint serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moored.cli.console import make_console
from moored.cli.options import AsJson, Concurrency, Endpoint, KeyVariable, Timeout
from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.envs.mix import EnvMix
    from moored.evaluate import Evaluation


Source = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run directory, a model (see `moored models`), or its name at the endpoint.",
    ),
]
EnvMixText = Annotated[
    str | None, typer.Option(help="Environment, as in a config; default: the run's own.")
]
NumTasks = Annotated[
    int | None, typer.Option("-n", "--num-tasks", min=1, show_default="as evaluation.num_tasks")
]
NumSamples = Annotated[int, typer.Option(help="Episodes per task, for pass@k.", min=1)]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, show_default="as evaluation.temperature")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Longest reply.", min=1, show_default="as rollout.max_response_tokens"),
]
SplitName = Annotated[str, typer.Option(help="validation, test or train.")]


def eval_command(
    source: Source,
    env: EnvMixText = None,
    num_tasks: NumTasks = None,
    samples: NumSamples = 1,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    split: SplitName = "validation",
    seed: int = 0,
    endpoint: Endpoint = None,
    api_key_env: KeyVariable = None,
    concurrency: Concurrency = 64,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Measure success on held-out tasks, with a 95 % interval."""
    from moored.config import EvaluationConfig, RolloutConfig
    from moored.envs.base import SPLIT_SEEDS

    if split not in SPLIT_SEEDS:
        raise ConfigError(f"split must be one of {', '.join(SPLIT_SEEDS)}, got {split!r}")
    mix = _checked_mix(env)
    defaults = EvaluationConfig()
    num_tasks = num_tasks or defaults.num_tasks
    with _EpisodeBar(num_tasks * samples) as bar:
        plan: dict[str, Any] = {
            "num_tasks": num_tasks,
            "num_samples": samples,
            "temperature": defaults.temperature if temperature is None else temperature,
            "max_tokens": max_tokens or RolloutConfig().max_response_tokens,
            "split": split,
            "seed": seed,
            "on_replies": bar.on_replies,
        }
        if endpoint is None:
            found = _evaluate_here(source, mix, plan)
        else:
            from moored.engine.endpoint.sampler import EndpointSampler, read_api_key
            from moored.evaluate import evaluate_endpoint

            key = read_api_key(api_key_env)
            sampler = EndpointSampler(
                endpoint, source, api_key=key, concurrency=concurrency, timeout_s=timeout
            )
            found = evaluate_endpoint(sampler, mix, **plan)
    print(json.dumps(asdict(found), indent=2) if as_json else _summary(found))


def _checked_mix(text: str | None) -> EnvMix | None:
    """The environments that were named; a wrong name or option is told before torch is imported."""
    from moored.config import parse_value
    from moored.envs.mix import EnvMix

    if text is None:
        return None
    mix = EnvMix.parse(parse_value(text, text))  # pyright: ignore[reportArgumentType]
    for env in mix.make():
        env.close()
    return mix


def _evaluate_here(source: str, mix: EnvMix | None, plan: dict[str, Any]) -> Evaluation:
    from moored.models.load import check_model_name

    if not (Path(source) / "config.yaml").is_file():
        check_model_name(source)
    from moored.engine.build import evaluate_source

    return evaluate_source(source, mix, **plan)


class _EpisodeBar:
    """Counts finished episodes and replies on the terminal.

    Goes to stderr and vanishes at the end; nothing is written when stderr is not a terminal.
    """

    def __init__(self, num_episodes: int) -> None:
        from rich import progress

        console = make_console(stderr=True)
        self._num_episodes = num_episodes
        self._bar = progress.Progress(
            progress.TextColumn("episodes"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=20),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=num_episodes)

    def __enter__(self) -> _EpisodeBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_replies(self, num_replies: int, num_live: int) -> None:
        num_done = self._num_episodes - num_live
        self._bar.update(self._task, completed=num_done, description=f"{num_replies} replies")


def _summary(found: Evaluation) -> str:
    low, high = found.interval
    length = "" if found.mean_reply_tokens is None else f" of {found.mean_reply_tokens:.0f} tokens"
    lines = [
        f"success {found.success_rate:.1%} (95% interval {low:.1%} to {high:.1%}) on "
        f"{found.num_tasks} tasks, {found.num_samples} episode(s) each",
        f"reward {found.reward_mean:.3f}, well-formed turns {found.validity_rate:.1%}, "
        f"{found.mean_turns:.2f} turns{length}",
    ]
    if found.num_samples > 1:
        lines.append(", ".join(f"pass@{k} {rate:.1%}" for k, rate in found.pass_at.items()))
    if found.num_errors:
        lines.append(f"{found.num_errors} episode(s) ended in an error and count as failures")
    return "\n".join(lines)
