"""How a client handles servers that stall, never stop sending, or send something unexpected."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from moored import json_http
from moored.errors import MooredError
from moored.json_http import (
    MAX_RETRY_AFTER_S,
    HttpError,
    JsonClient,
    parse_retry_after,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def raw_server(*pieces: bytes, endless: bytes = b"") -> Iterator[str]:
    """Answers every request with these bytes, then with `endless` until the client leaves."""
    closing = threading.Event()

    def serve() -> None:
        while not closing.is_set():
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                    while endless and not closing.wait(0.005):
                        connection.sendall(endless)
                except OSError:  # the client had enough
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
        closing.set()
        socket.create_connection(("127.0.0.1", port)).close()  # wakes accept
        thread.join()


def read_request(connection: socket.socket) -> None:
    """All of it: what is unread when a connection closes takes the answer with it."""
    data, length = b"", 0
    while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length:
        piece = connection.recv(1 << 16)
        if not piece:
            return
        data += piece
        found = re.search(rb"content-length: *(\d+)", data.lower())
        length = int(found[1]) if found else 0


def failure(url: str, *, timeout_s: float = 30.0, key: str | None = None) -> HttpError:
    client = JsonClient(url, api_key=key, timeout_s=timeout_s)
    with pytest.raises(HttpError) as caught:
        client.post("/chat/completions", {"a": 1})
    client.close()
    return caught.value


def test_an_answer_that_never_ends_is_given_up_after_the_time_limit():
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    with raw_server(chunked, endless=b"1\r\n \r\n") as url:
        error = failure(url, timeout_s=0.2)
    assert str(error) == "no answer within 0.2 s"
    assert error.is_transient and not error.is_unreachable


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        OK + b"Content-Length: 50\r\n\r\n{}",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["nothing", "not http", "cut", "not gzip"],
)
def test_a_broken_answer_is_worth_another_try(answer):
    with raw_server(answer) as url:
        error = failure(url)
    assert error.is_transient and not error.is_unreachable and error.message


def test_a_key_that_a_server_repeats_is_not_shown():
    with raw_server(b"HTTP/1.1 403 No sk-1234\r\n\r\nkey sk-1234 is bad") as url:
        assert str(failure(url, key="sk-1234")) == "403 No ***: key *** is bad"


@pytest.mark.parametrize("url", ["host:8000", "ftp://host/v1", "http://ho st/v1", "http://:1/v1"])
def test_an_address_that_is_not_one_is_refused(url):
    with pytest.raises(MooredError, match="must look like http://host:8000/v1"):
        JsonClient(url, api_key=None, timeout_s=1.0)


def test_retry_after_is_a_number_or_a_date_and_has_a_bound(monkeypatch):
    monkeypatch.setattr(json_http.time, "time", lambda: 1_000_000.0)
    assert parse_retry_after("5") == 5.0
    assert parse_retry_after(formatdate(1_000_020.0, usegmt=True)) == 20.0
    assert [parse_retry_after(text) for text in (None, "soon", "-3", "nan")] == [0.0] * 4
    assert parse_retry_after("1e9") == MAX_RETRY_AFTER_S
