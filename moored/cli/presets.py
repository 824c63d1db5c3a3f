"""`moored presets`: the ready-made configurations."""

from __future__ import annotations

import json

from moored.cli.options import AsJson


def presets_command(as_json: AsJson = False) -> None:
    """List the presets; several can be laid over each other: `moored train sokoban grpo`."""
    from moored.presets import describe_presets

    found = describe_presets()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, summary in found.items():
        print(f"{name:<{width}}  {summary}")
