"""A program that stands for vLLM's server: `python fake_server.py --port N … --model FOLDER`.

A reply counts up from the prompt's first id; its log-probabilities are the sum of all weights that
the server has read last. With `--fails` among the words it ends at once.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STATE: dict[str, Any] = {"weights": 0.0, "names": [], "calls": []}


def read(folder: str) -> None:
    from safetensors.numpy import load_file

    (file,) = Path(folder).glob("*.safetensors")
    found = load_file(file)
    assert (Path(folder) / "config.json").is_file()
    STATE["weights"] = float(sum(float(tensor.sum()) for tensor in found.values()))
    STATE["names"] = sorted(found)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    version = "0.32.0"
    is_for_development = True
    max_model_len = 256

    def answer(self, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        model = {"id": "served", "max_model_len": self.max_model_len}
        answers = {"/version": {"version": self.version}, "/v1/models": {"data": [model]}}
        answers |= {"/is_sleeping": {"is_sleeping": False}} if self.is_for_development else {}
        answers |= {"/state": STATE}
        self.answer(200 if self.path in answers else 404, answers.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        STATE["calls"].append([self.path, body])
        if self.path == "/collective_rpc":
            try:
                read(body["kwargs"]["weights_path"])
            except OSError as error:
                self.answer(500, {"error": {"message": str(error)}})
                return
            self.answer(200, {"results": [None]})
        elif self.path == "/reset_prefix_cache":
            self.answer(200, None)
        else:
            self.complete(body)

    def complete(self, body: dict) -> None:
        ids = [body["prompt"][0] + t for t in range(body["max_tokens"])]
        if body["prompt"][0] == 13:
            self.answer(500, {"error": {"message": "out of luck"}})
            return
        stops = [t for t, token in enumerate(ids) if token in body["stop_token_ids"]]
        ids = ids[: stops[0] + 1] if stops else ids
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [STATE["weights"]] * len(ids)},
            "finish_reason": "stop" if stops else "length",
        }
        self.answer(200, {"choices": [choice]})

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def main(words: list[str]) -> None:
    if "--fails" in words:
        sys.exit("ValueError: no such model\nRuntimeError: engine died")
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
