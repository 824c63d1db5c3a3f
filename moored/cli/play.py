"""`moored play`: an environment in the terminal, or as a web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moored.cli.console import make_console
from moored.cli.options import EnvName, EnvOptions, parse_options
from moored.cli.web_page import play_on_web_page
from moored.errors import ConfigError


def play_command(
    name: EnvName,
    seed: Annotated[int, typer.Option(help="Task seed.")] = 0,
    episode: Annotated[int, typer.Option(help="Episode seed: the noise, where there is any.")] = 0,
    oracle: Annotated[bool, typer.Option("--oracle", help="Let the oracle play.")] = False,
    image: Annotated[
        bool, typer.Option("--image", help="Play in pictures; save them, each game in a folder.")
    ] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Play on a web page, where the environment has one.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of --web; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Where --image saves; frames/ if not given."),
    ] = None,
    option: EnvOptions = None,
) -> None:
    """Play an environment with the text that the model gets.

    `help` says how, `quit` leaves.
    """
    from moored.cli.episode import ask_in_terminal, new_game_folder, play_episode
    from moored.envs.mix import open_env

    if folder is not None and not image:
        raise ConfigError(f"a folder ({folder}) is for pictures only; add --image")
    options = parse_options(option or [])
    if web:
        if image or oracle:
            raise ConfigError("--web is for a person; leave out --image and --oracle")
        play_on_web_page(name, options, task_seed=seed, episode_seed=episode, port=port)
        return
    if image:
        options = _with_pictures(name, options)
    with open_env(name, **options) as env:
        play_episode(
            env,
            make_console(),
            task_seed=seed,
            episode_seed=episode,
            ask=None if oracle else ask_in_terminal,
            image_dir=new_game_folder(folder or Path("frames")) if image else None,
        )


def _with_pictures(name: str, options: dict[str, object]) -> dict[str, object]:
    """Ask for the image view, where there are views and none was chosen."""
    from moored.envs.mix import option_defaults, resolve_source

    factory, _ = resolve_source(name, options)
    has_views = callable(factory) and "view" in option_defaults(factory)
    return {"view": "image", **options} if has_views else options
