"""`moored models`: what can be used by name."""

from __future__ import annotations

from moored.cli.json_output import print_json
from moored.cli.options import AsJson


def models_command(as_json: AsJson = False) -> None:
    """List the models that can be used by name."""
    from moored.models.find import describe_models

    rows = describe_models()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['name']:<12} {row['what']}")
