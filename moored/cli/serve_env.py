"""`moored serve-env`: an environment over HTTP, for other processes and machines."""

from __future__ import annotations

from typing import Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.listening import LOOPBACK, listen, read_token, serve
from moored.cli.options import EnvName, EnvOptions, parse_options
from moored.errors import require_packages

TOKEN_VARIABLE = "MOORED_ENV_TOKEN"


def serve_env_command(
    name: EnvName,
    option: EnvOptions = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = LOOPBACK[0],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    max_sessions: Annotated[int, typer.Option(help="Sessions at a time.", min=1)] = 1024,
    idle_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Close a session that is not used for so long.")
    ] = 600.0,
    call_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up a call that takes longer.")
    ] = 60.0,
    max_request_bytes: Annotated[int, typer.Option(help="Size of a request.", min=1)] = 8 << 20,
    token_variable: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Variable with the token that clients must give; needed beyond this machine.",
        ),
    ] = TOKEN_VARIABLE,
) -> None:
    """Serve an environment to other processes; Ctrl-C stops."""
    require_packages("serve-env", ("starlette", "uvicorn", "websockets"))
    from moored.envs.mix import make_env
    from moored.envs.serving.app import build_app
    from moored.envs.serving.sessions import Limits

    limits = Limits(
        max_sessions=max_sessions,
        idle_timeout_s=idle_timeout,
        call_timeout_s=call_timeout,
        max_request_bytes=max_request_bytes,
    )
    options = parse_options(option or [])
    token = read_token(token_variable, host)
    app = build_app(lambda: make_env(name, **options), limits=limits, token=token)
    listener = listen(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}"

    def tell() -> None:
        told = f"serving {name} at {address} ({max_sessions} sessions at a time)"
        print_line(make_console(), told)

    serve(app, listener, tell=tell, max_message_bytes=max_request_bytes)
