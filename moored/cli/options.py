"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.config import Config

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
EnvName = Annotated[str, typer.Argument(help="A name from `moored envs`, or module:Class.")]
EnvOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the environment, such as max_turns=8; may be given several times.",
    ),
]
ConfigWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET|FILE|KEY=VALUE]…",
        help="Presets or YAML files, laid over each other, and options: filter.value=0.8.",
    ),
]
Rollouts = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE…",
        help="Rollouts of moored, TRL or verl; Parquet, JSON, CSV or W&B tables with columns of "
        "known names. Or folders of them, such as a run directory.",
    ),
]
ROWS, SERVER = "How files are read", "A model behind a server"
"""Panels of help."""
Reader = Annotated[
    str | None,
    typer.Option(
        help="moored, trl, verl or plain, or module:attribute; default: by the columns.",
        rich_help_panel=ROWS,
    ),
]
RewardColumns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN[=WEIGHT]",
        help="Reward column; several are added up.",
        rich_help_panel=ROWS,
    ),
]
GroupColumn = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Column of the group; default: group, else the prompt.",
        rich_help_panel=ROWS,
    ),
]
ColumnNames = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        metavar="WHAT=COLUMN,…",
        help="Columns with other names: prompt=question,response=output; also messages, step, "
        "group, env, success.",
        rich_help_panel=ROWS,
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Count bad rows and go on.", rich_help_panel=ROWS),
]

Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="OpenAI-compatible server: http://host:8000/v1.",
        rich_help_panel=SERVER,
    ),
]
KeyVariable = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variable with its key; default OPENAI_API_KEY.",
        rich_help_panel=SERVER,
    ),
]
Concurrency = Annotated[
    int, typer.Option(help="Requests to it at a time.", min=1, rich_help_panel=SERVER)
]
Timeout = Annotated[
    float, typer.Option(help="Seconds it may take for a reply.", rich_help_panel=SERVER)
]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate presets and files from `key=value` overrides."""
    presets = [word for word in words if "=" not in word]
    return presets, [word for word in words if "=" in word]


def read_config(words: Sequence[str]) -> Config:
    """The configuration that presets, files and overrides add up to, with learning rates."""
    from moored.config import load_config
    from moored.models.rates import with_rates
    from moored.presets import read_presets

    presets, overrides = split_words(words)
    _check_presets(presets)
    config = load_config(read_presets(presets), overrides)
    _check_model_is_no_preset(config.model)
    return with_rates(config)


def _check_presets(words: Sequence[str]) -> None:
    """Say how the name of an environment or a model is written where a preset is expected."""
    from moored.envs import ENVIRONMENTS
    from moored.models.find import embedded_models
    from moored.presets import preset_names

    kinds = dict.fromkeys(ENVIRONMENTS, ("an environment", "env"))
    kinds |= dict.fromkeys([*embedded_models(), "smollm2"], ("a model", "model"))
    for word in words:
        if word in kinds and word not in preset_names() and not Path(word).exists():
            what, option = kinds[word]
            raise ConfigError(f"{word!r} is {what}, not a preset; write {option}={word}")


def _check_model_is_no_preset(model: str) -> None:
    from moored.presets import preset_kinds

    if preset_kinds().get(model) == "model" and not Path(model).exists():
        raise ConfigError(f"model {model!r} is a preset; write {model} without model=")


def check_config(config: Config, *, foreign: bool = True) -> None:
    """Refuse what cannot run, as far as that is known without importing torch, which takes seconds.

    Checks that sinks are installed, that models exist and are made for dialogues as long as these
    may be, and environments with their options; without `foreign`, as for commands that only read,
    no code that the configuration names runs.
    """
    from moored.engine.check import check_context
    from moored.envs.mix import EnvMix
    from moored.models.find import check_model_name
    from moored.runlog.sinks import require_sinks

    require_sinks(config.log.sinks)
    check_model_name(config.model)
    check_context(config)
    EnvMix(config.env).check(foreign=foreign)


def parse_options(pairs: Sequence[str]) -> dict[str, object]:
    """Read `key=value` pairs; values are JSON or YAML: 8, 0.5, true, [1, 2], text."""
    from moored.config_text import parse_value

    options: dict[str, object] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"an option must look like key=value, got {pair!r}")
        options[key.strip()] = parse_value(value, pair)
    return options
