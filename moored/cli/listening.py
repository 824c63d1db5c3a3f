"""The port that a command serves at."""

from __future__ import annotations

import socket

from moored.errors import MooredError


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
