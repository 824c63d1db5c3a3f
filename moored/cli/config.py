"""`moored config`: what presets and options add up to, and what each option means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.json_output import print_json
from moored.cli.options import AsJson, check_config, read_config
from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.cli.option_docs import OptionDoc

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET|FILE|KEY[=VALUE]]…",
        help="Presets, YAML files and options, as for `moored train`; or the name of an option or "
        "section to explain: filter.value, filter.",
    ),
]


def config_command(what: Words = None, as_json: AsJson = False) -> None:
    """Print a configuration in full, or explain an option.

    Alone it lists all options with their defaults. `moored config sokoban grpo filter.value=0.8`
    checks and prints what these come to; `moored config filter.value` explains one option.
    """
    words = what or []
    keys = [word for word in words if _is_key(word)]
    config = read_config([word for word in words if word not in keys])
    check_config(config, foreign=False)
    if keys:
        _explain(keys, config.model_dump(mode="json"), as_json)
    elif as_json:
        print_json(config.model_dump(mode="json"))
    else:
        from moored.cli.option_docs import annotated_yaml

        print(annotated_yaml(config), end="")


def _is_key(word: str) -> bool:
    """True for `filter`, `filter.value` and misspelt options."""
    from moored.config import Config
    from moored.presets import preset_names

    if "=" in word or word in preset_names() or Path(word).exists():
        return False
    is_path = "/" in word or word.endswith((".yaml", ".yml"))
    return word in Config.model_fields or ("." in word and not is_path)


def _explain(keys: Sequence[str], config: dict[str, object], as_json: bool) -> None:
    from moored.cli.option_docs import section_docs

    found = [option for key in keys for option in _options_of(key)]
    if as_json:
        rows = {
            option.name: {
                "kind": option.kind,
                "default": option.default,
                "value": _value(config, option.name),
                "doc": option.doc,
            }
            for option in found
        }
        print_json(rows)
        return
    for key in keys:
        if key in section_docs():
            print(f"{key}: {section_docs()[key]}\n")
        for option in _options_of(key):
            _print(option, _value(config, option.name))


def _options_of(key: str) -> list[OptionDoc]:
    """The option, or all options of a section."""
    from moored.cli.option_docs import all_options
    from moored.errors import close_match_hint

    options = all_options()
    inside = [option for name, option in options.items() if name.startswith(f"{key}.")]
    found = [options[key], *inside] if key in options else inside
    if not found:
        section = key.partition(".")[0]
        known = [name for name in options if name.startswith(f"{section}.")] or list(options)
        raise ConfigError(f"unknown option {key!r}; {close_match_hint(key, known)}")
    return found


def _print(option: OptionDoc, value: object) -> None:
    from moored.cli.option_docs import to_yaml

    print(f"{option.name}={to_yaml(value)}")
    print(f"  {option.doc}")
    print(f"  {option.kind}; default {to_yaml(option.default)}")


def _value(config: object, dotted: str) -> object:
    for key in dotted.split("."):
        config = config[int(key)] if isinstance(config, list) else config[key]  # pyright: ignore
    return config
