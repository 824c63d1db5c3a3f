"""The port that a command serves at, and the server there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from moored.errors import MooredError

if TYPE_CHECKING:
    from starlette.applications import Starlette


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def read_token(variable: str, host: str) -> str:
    """What clients must give; a server that other machines reach needs it."""
    token = os.environ.get(variable, "").strip()
    if not token and host not in LOOPBACK:
        raise MooredError(
            f"anyone who reaches {host} could use the server; set {variable} to a secret that its "
            f"clients have too, or serve at {LOOPBACK[0]}"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address, 0 for a free port; raises MooredError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off, which costs 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise MooredError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port or "
            f"address"
        ) from None
    return listener


def serve(
    app: Starlette,
    listener: socket.socket,
    *,
    tell: Callable[[], None],
    max_message_bytes: int = 16 << 20,
) -> None:
    """Serve until Ctrl-C or SIGTERM; `tell` says where, once the server heeds both.

    `max_message_bytes` bounds what comes over a WebSocket.
    """
    import uvicorn

    class TellingServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not self.started:
                return
            try:
                # Not earlier: Python may drop a Ctrl-C while it imports what the server needs.
                tell()
            except BaseException:  # such as the SystemExit of a closed pipe
                await self.shutdown(sockets)
                raise

    config = uvicorn.Config(
        app, log_level="warning", ws_max_size=max_message_bytes, timeout_graceful_shutdown=5
    )
    # Ctrl-C is how a server is ended, so it is no error.
    with suppress(KeyboardInterrupt):
        TellingServer(config).run(sockets=[listener])
