"""`moored play --web`: an environment as a web page, on this machine only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from moored.cli.console import make_console, print_line
from moored.cli.listening import listen, serve
from moored.errors import ConfigError, require_packages

HOST = "127.0.0.1"


def play_on_web_page(
    name: str, options: Mapping[str, object], *, task_seed: int, episode_seed: int, port: int
) -> None:
    """Serve the page of an environment until Ctrl-C; needs its method `web_app`."""
    from moored.envs.mix import open_env

    with open_env(name, **options) as env:
        make_app = getattr(env, "web_app", None)
        if make_app is None:
            raise ConfigError(f"{name} has no web page; play it in the terminal, without --web")
        require_packages("play --web", ("starlette", "uvicorn"))
        with closing(listen(HOST, port)) as listener:
            app = make_app(task_seed, episode_seed)
            address = f"http://{HOST}:{listener.getsockname()[1]}"
            told = f"{env.name} is at {address} (Ctrl-C closes it)"
            serve(app, listener, tell=lambda: print_line(make_console(), told))
