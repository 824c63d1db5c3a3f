"""`moored config`: what presets and options add up to."""

from __future__ import annotations

import json

from moored.cli.options import AsJson, ConfigWords, check_config, read_config


def config_command(what: ConfigWords = None, as_json: AsJson = False) -> None:
    """Check a configuration and print it in full, as `moored train` would run it."""
    from moored.config import dump_config

    config = read_config(what or [])
    check_config(config)
    if as_json:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
    else:
        print(dump_config(config), end="")
