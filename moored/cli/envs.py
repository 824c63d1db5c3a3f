"""`moored envs`: the environments, their turns, rewards and extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moored.cli.console import make_console
from moored.cli.json_output import print_json
from moored.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moored.envs.describe import EnvInfo

EXTRAS = "Extras, some for single options only: pip install 'moored[NAME]'."
NARROW = 70
"""Columns below which a table of environments cannot be read."""


def envs_command(as_json: AsJson = False) -> None:
    """List the environments."""
    from moored.envs import ENVIRONMENTS
    from moored.envs.describe import describe_env

    infos = [describe_env(name) for name in ENVIRONMENTS]
    if as_json:
        print_json([_info_dict(info) for info in infos], default=repr)
    else:
        print_envs(make_console(), infos)


def print_envs(console: Console, infos: Sequence[EnvInfo]) -> None:
    """A table, or on a narrow terminal one paragraph per environment."""
    from rich.padding import Padding
    from rich.text import Text

    if console.width >= NARROW:
        console.print(_envs_table(infos))
        console.print(EXTRAS)
        return
    for info in infos:
        turns = (
            "1 turn"
            if info.max_turns == 1
            else f"{info.max_turns or 'the server decides on the'} turns"
        )
        console.print(Text.assemble((info.name, "bold"), f" · {turns}"))
        extras = ["Extras: " + ", ".join(map(_short_extra, info.extras))] if info.extras else []
        for text in (info.summary, f"Reward: {info.reward}", *extras):
            console.print(Padding(Text(text), (0, 0, 0, 2)))
    console.print(EXTRAS)


def _short_extra(extra: str) -> str:
    """`images` for `moored[images]`."""
    return extra.partition("[")[2].rstrip("]")


def _envs_table(infos: Sequence[EnvInfo]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for column, share in (("name", 0), ("turns", 0), ("task", 4), ("reward", 5), ("extras", 0)):
        table.add_column(column, ratio=share or None, no_wrap=not share)
    for info in infos:
        extras = "\n".join(map(_short_extra, info.extras))
        cells = (info.summary, info.reward, extras or "–")
        name = Text(info.name, style="bold")
        table.add_row(name, str(info.max_turns or "–"), *map(Text, cells))
    return table


def _info_dict(info: EnvInfo) -> dict[str, object]:
    from moored.envs.mix import REQUIRED

    return {
        "name": info.name,
        "max_turns": info.max_turns,
        "is_stochastic": info.is_stochastic,
        "summary": info.summary,
        "reward": info.reward,
        "extras": list(info.extras),
        "options": {
            name: None if default is REQUIRED else default for name, default in info.options.items()
        },
        "required": [name for name, default in info.options.items() if default is REQUIRED],
    }
