"""`moored presets`: the ready-made configurations."""

from __future__ import annotations

from moored.cli.json_output import print_json
from moored.cli.options import AsJson

TITLES = {
    "environment": "Environments: what is played",
    "algorithm": "Algorithms: how rewards become an update",
    "filter": "Filters: which groups are trained on",
    "model": "Models: which one is trained, at which rates and sizes",
    "run": "Whole runs; others may be laid over them",
}


def presets_command(as_json: AsJson = False) -> None:
    """List the presets: tasks, algorithms, filters, models, runs.

    One of each kind may be given: `moored train sokoban grpo`.
    """
    from moored.presets import describe_presets, preset_kinds

    found, kinds = describe_presets(), preset_kinds()
    if as_json:
        rows = {name: {"kind": kinds[name], "summary": text} for name, text in found.items()}
        print_json(rows)
        return
    width = max(map(len, found))
    for kind, title in TITLES.items():
        print(title)
        for name, summary in found.items():
            if kinds[name] == kind:
                print(f"  {name:<{width}}  {summary}")
        print()
    print("Later ones win: moored train sokoban grpo no_filter num_steps=50")
    print("What they come to: moored config sokoban grpo; all options: moored config")
