"""A chat-completions server in a thread, for tests: gives set answers, and records requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moored.engine.endpoint.chat_api import message_to_json
from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import make_env
from moored.reply import format_reply


@dataclass(frozen=True)
class Answer:
    """One answer of the server; `drops` closes the connection instead, `hangs` says nothing."""

    body: object = b""
    """Sent as it is when bytes, else as JSON."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    drops: bool = False
    hangs: bool = False


@dataclass(frozen=True)
class Seen:
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


def reply(text: str | None, **message: object) -> Answer:
    """A completion whose usage says 7 tokens."""
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    return Answer({"choices": [choice], "usage": {"completion_tokens": 7}})


def error(status: int, message: str, **headers: str) -> Answer:
    return Answer(
        {"error": {"message": message}},
        status,
        {k.replace("_", "-"): v for k, v in headers.items()},
    )


class _Server(ThreadingHTTPServer):
    # More connections may wait than are ever opened at once; the rest would be reset.
    request_queue_size = 128


class ChatServer:
    """Serves until closed. `answer(body, number)` is asked for each completion, from 0 on."""

    def __init__(
        self, answer: Callable[[dict[str, Any], int], Answer], models: Sequence[str] = ()
    ) -> None:
        self.answer = answer
        self.models = models
        self.seen: list[Seen] = []
        """What was posted, in order."""
        self.num_lookups = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        # A short poll: closing waits for it.
        serve = {"poll_interval": 0.01}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=serve)
        self._thread.start()

    def note(self, seen: Seen) -> int:
        with self._lock:
            self.seen.append(seen)
            return len(self.seen) - 1

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = server.note(Seen(self.path, dict(self.headers), body))
                known = self.path == "/v1/chat/completions"
                self._send(server.answer(body, number) if known else error(404, "Not Found"))

            def do_GET(self) -> None:
                server.num_lookups += 1
                known = self.path == "/v1/models" and server.models
                listed = Answer({"data": [{"id": name} for name in server.models]})
                self._send(listed if known else error(404, "Not Found"))

            def _send(self, answer: Answer) -> None:
                if answer.hangs:
                    server.closing.wait()
                if answer.drops or answer.hangs:
                    return
                raw = answer.body
                data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def oracle(name: str, num_tasks: int, **options: object) -> Callable[[dict[str, Any], int], Answer]:
    """Answers of an agent that knows the way through the first validation tasks of `name`.

    It finds the task by the first messages, plays the earlier replies, and asks the environment.
    """
    seeds = {}
    for seed in SPLIT_SEEDS["validation"][:num_tasks]:
        first = [message_to_json(m) for m in make_env(name, **options).reset(seed)]
        seeds[json.dumps(first)] = seed

    def answer(body: dict[str, Any], number: int) -> Answer:
        messages = body["messages"]
        env = make_env(name, **options)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        env.reset(seeds[json.dumps(messages[: len(messages) - 2 * len(replies)])])
        for text in replies:
            env.step(text)
        return reply(format_reply("I know.", env.oracle()))

    return answer
