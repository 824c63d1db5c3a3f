"""`moored eval`: success of a run, a model, or what an endpoint serves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moored.cli.console import counted, printable
from moored.cli.json_output import print_json
from moored.cli.options import AsJson, Concurrency, Endpoint, KeyVariable, Timeout
from moored.cli.run_folders import explain_moved_paths
from moored.engine.workers.ranks import kind_here
from moored.errors import MooredError

if TYPE_CHECKING:
    from moored.config import Config
    from moored.evaluate import Evaluation

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of other programs."""

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
    int | None,
    typer.Option(
        "-n", "--num-tasks", help="Tasks.", min=1, show_default="the run's evaluation.num_tasks"
    ),
]
NumSamples = Annotated[int, typer.Option(help="Episodes per task, for pass@k.", min=1)]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, show_default="the run's evaluation.temperature")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Longest reply.", min=1, show_default="the run's"),
]
SplitName = Annotated[str, typer.Option(help="validation, test or train.")]
SamplerName = Annotated[
    str | None,
    typer.Option(help="Who writes: auto, fast, plain or vllm.", show_default="as engine.sampler"),
]


def eval_command(
    source: Source,
    env: EnvMixText = None,
    num_tasks: NumTasks = None,
    samples: NumSamples = 1,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    split: SplitName = "validation",
    seed: int = 0,
    sampler: SamplerName = None,
    endpoint: Endpoint = None,
    api_key_env: KeyVariable = None,
    concurrency: Concurrency = 64,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Measure success on held-out tasks, with a 95 % interval."""
    # What is not given is the run's own.
    chosen = {"num_tasks": num_tasks, "temperature": temperature}
    given: dict[str, Any] = {
        "evaluation": {"num_samples": samples, "split": split} | _without_none(chosen),
        "rollout": _without_none({"max_response_tokens": max_tokens}),
        "seed": seed,
    }
    if endpoint is not None and sampler is not None:
        raise MooredError("--sampler is for a model in this process; leave it out with --endpoint")
    if sampler is not None:
        given["engine"] = {"sampler": sampler}
    if endpoint is not None:
        server = {"url": endpoint, "api_key_env": api_key_env, "concurrency": concurrency}
        given["engine"] = {"kind": "endpoint", "endpoint": {**server, "timeout_s": timeout}}
        # The server decides how long a dialogue may get.
        given["rollout"] |= {"max_context": sys.maxsize}
    try:
        found = evaluate_source(source, env, given)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was measured", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(asdict(found))
    else:
        print(printable(_summary(found)))


def evaluate_source(source: str, env: str | None, given: dict[str, Any]) -> Evaluation:
    """Evaluate a run (its newest checkpoint), a model, or what a server calls `source`."""
    from moored.engine.checkpoint import has_only_model, newest_checkpoint
    from moored.envs.mix import EnvMix
    from moored.models.find import check_model_name

    is_endpoint = given.get("engine", {}).get("kind") == "endpoint"
    is_run = not is_endpoint and (Path(source) / "config.yaml").is_file()
    if not is_run and not is_endpoint:
        check_model_name(source)
    config = _evaluation_config(source, env, given, is_run=is_run)
    has_checkpoint = is_run and not has_only_model(Path(source))
    if has_checkpoint:
        newest_checkpoint(Path(source))  # raises where there is none yet
    mix = EnvMix(config.env)
    mix.check()
    if is_run:
        with explain_moved_paths(Path(source), config):
            check_model_name(config.model)
    # Only now, because they import torch.
    from moored.cli.progress import EpisodeBar
    from moored.engine.build import build_engine
    from moored.evaluate import evaluate

    options, model = config.evaluation, config.model
    with (
        closing(build_engine(config, trains=False)) as engine,
        EpisodeBar(options.num_tasks * options.num_samples) as bar,
    ):
        engine.check()
        if has_checkpoint:
            # A run that goes on has meanwhile put others in the place of its checkpoints.
            model = newest_checkpoint(Path(source))
            engine.learner.load(model, policy_only=True)
            engine.publish()
        found = evaluate(engine, mix, config, on_replies=bar.on_replies)
    if is_endpoint:
        # The server's own count: a token is a character here.
        found = replace(found, mean_reply_tokens=engine.sampler.mean_reply_tokens)  # pyright: ignore[reportAttributeAccessIssue]
    return replace(found, model=str(model))


def _evaluation_config(
    source: str, env: str | None, given: dict[str, Any], *, is_run: bool
) -> Config:
    """What was given, laid over the configuration of the run if there is one."""
    from moored.config import load_config
    from moored.config_text import parse_value
    from moored.engine.checkpoint import has_only_model

    if env is None and not is_run:
        raise MooredError("a model has no environment of its own; give --env, e.g. --env sokoban")
    own = {} if env is None else {"env": parse_value(env, env)}
    of_run: dict[str, Any] = {"model": source}
    if not is_run and given.get("engine", {}).get("kind") != "endpoint":
        of_run["rollout"] = _lengths_of(source, given.get("rollout", {}).get("max_response_tokens"))
    if is_run:
        of_run = load_config(Path(source) / "config.yaml").model_dump()
    if is_run and has_only_model(Path(source)):
        # Adapters are summed into the weights there.
        of_run["model"], of_run["optimizer"]["lora_rank"] = str(Path(source) / "model"), 0
    if is_run and of_run["engine"]["kind"] == "ray":
        # In this process: the cluster of the run may be gone.
        of_run["engine"]["kind"], of_run["rollout"]["max_lag"] = "local", 0
    asked = {**_merged(of_run, given), **own}
    engine = asked.get("engine", {})
    return load_config({**asked, "engine": {**engine, "kind": kind_here(engine.get("kind"))}})


def _lengths_of(model: str, asked: int | None) -> dict[str, int]:
    """For a model that reads fewer tokens than a dialogue usually may have; empty for others.

    `asked`: tokens of the longest reply, where the user says.
    """
    from moored.config import RolloutConfig
    from moored.models.lengths import exact_limit
    from moored.models.shapes import description_of

    longest, usual = exact_limit(description_of(model)), RolloutConfig()
    if longest is None or longest >= usual.max_context:
        return {}
    if asked is not None and asked >= longest:
        # Every episode would end before its first reply, and count as a failure of the model.
        raise MooredError(
            f"--max-tokens {asked} leaves no room for a prompt in the {longest} tokens that "
            f"model {model!r} was made for, or that its layers look back; give fewer"
        )
    reply = min(usual.max_response_tokens, longest // 2)
    return {"max_context": longest, "max_response_tokens": reply}


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the sections and values of `over` laid over it."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _summary(found: Evaluation) -> str:
    num_episodes, (low, high) = found.num_tasks * found.num_samples, found.interval
    where = f"{counted(found.num_tasks, 'task')}, {counted(found.num_samples, 'episode')} each"
    length = "" if found.mean_reply_tokens is None else f" of {found.mean_reply_tokens:.0f} tokens"
    lines = [
        f"success {found.success_rate:.1%} (95% interval {low:.1%} to {high:.1%}) on {where}",
        f"reward {found.reward_mean:.3f}, well-formed turns {found.validity_rate:.1%}, "
        f"{found.mean_turns:.2f} turns{length}",
    ]
    if found.num_errors == num_episodes:
        lines = [f"success was not measured on {where}"]
    elif found.num_samples > 1:
        lines.append(", ".join(f"pass@{k} {rate:.1%}" for k, rate in found.pass_at.items()))
    if found.num_errors:
        lines.append(
            f"{found.num_errors} of {counted(num_episodes, 'episode')} ended in an error and "
            f"{'counts' if found.num_errors == 1 else 'count'} in neither success nor reward"
        )
    first, last = found.task_seeds
    lines.append(
        f"model {found.model}, temperature {found.temperature:g}, {found.split} tasks {first} to "
        f"{last}, seed {found.seed}"
    )
    return "\n".join(lines)
