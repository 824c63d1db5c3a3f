"""`moored eval`: success of a run, a model, or what an endpoint serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moored.cli.console import make_console
from moored.cli.options import AsJson
from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.evaluate import Evaluation


def eval_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run directory, a model (see `moored models`), or its name at the endpoint.",
        ),
    ],
    env: Annotated[
        str | None, typer.Option(help="Environment, as in a config; default: the run's own.")
    ] = None,
    num_tasks: Annotated[
        int | None,
        typer.Option("-n", "--num-tasks", min=1, show_default="as evaluation.num_tasks"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Episodes a task, for pass@k.", min=1)] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, show_default="as evaluation.temperature")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest reply.", min=1, show_default="as rollout.max_response_tokens"),
    ] = None,
    split: Annotated[str, typer.Option(help="validation, test or train.")] = "validation",
    seed: Annotated[int, typer.Option()] = 0,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="OpenAI-compatible server: http://host:8000/v1."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variable with its key; default OPENAI_API_KEY."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to it at a time.", min=1)] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds it may take for a reply.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Measure success on held-out tasks, with a 95 % interval."""
    from moored.config import EvaluationConfig, RolloutConfig, parse_value
    from moored.envs.base import SPLIT_SEEDS
    from moored.envs.mix import EnvMix
    from moored.models.load import check_model_name

    if split not in SPLIT_SEEDS:
        raise ConfigError(f"split must be one of {', '.join(SPLIT_SEEDS)}, got {split!r}")
    mix = None if env is None else EnvMix.parse(parse_value(env, env))  # pyright: ignore[reportArgumentType]
    for made in () if mix is None else mix.make():
        made.close()
    if endpoint is None and not (Path(source) / "config.yaml").is_file():
        check_model_name(source)
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
            from moored.engine.build import evaluate_source

            found = evaluate_source(source, mix, **plan)
        else:
            from moored.engine.endpoint.sampler import EndpointSampler, read_api_key
            from moored.evaluate import evaluate_endpoint

            sampler = EndpointSampler(
                endpoint,
                source,
                api_key=read_api_key(api_key_env),
                concurrency=concurrency,
                timeout_s=timeout,
            )
            found = evaluate_endpoint(sampler, mix, **plan)
    print(json.dumps(asdict(found), indent=2) if as_json else _summary(found))


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
