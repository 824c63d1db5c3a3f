"""Scores from a server, against a fake that answers in the ways real ones do."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moored.cli.main import main
from moored.config_engine import EndpointConfig
from moored.engine.endpoint import scorer as endpoint
from moored.engine.endpoint.scorer import EndpointScorer
from moored.errors import MooredError
from moored.types import Prompt, ScoreRequest

REQUEST = ScoreRequest(Prompt(np.array([3, 1])), [np.array([4, 1, 5]), np.array([9])])
WANTED = [[-1.04, -4.01, -1.05], [-1.09]]


def logp(ids: list[int]) -> list[float | None]:
    """Of a token: minus the token before it, minus 1 % of itself."""
    return [None, *(-before - token / 100 for before, token in pairwise(ids))]


def echoed(body: dict[str, Any]) -> object:
    assert body["logprobs"] == 1
    generated = [*logp(body["prompt"]), -0.5]
    return {"choices": [{"text": "…", "logprobs": {"token_logprobs": generated}}]}


def vllm(body: dict[str, Any]) -> object:
    places = zip(body["prompt"], logp(body["prompt"]), strict=True)
    found = [None if x is None else {str(token): {"logprob": x}} for token, x in places]
    return {"choices": [{"text": "…", "prompt_logprobs": found}]}


@contextmanager
def served(
    answer: Callable[[dict[str, Any]], object],
) -> Iterator[tuple[EndpointScorer, list[dict[str, Any]]]]:
    """A server; an integer for an answer is a status."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            found = answer(body)
            data = json.dumps({"error": "no"} if isinstance(found, int) else found).encode()
            self.send_response(found if isinstance(found, int) else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        options = EndpointConfig(url=url, concurrency=2, timeout_s=5.0)
        yield EndpointScorer("m", options), seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check(scorer: EndpointScorer) -> None:
    for found, wanted in zip(scorer.score([REQUEST])[0], WANTED, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_echoed_log_probs_are_those_of_the_continuation():
    with served(echoed) as (scorer, seen):
        check(scorer)
        check(scorer)
    assert [3, 1, 4, 1, 5] in [body["prompt"] for body in seen]
    assert all(body["model"] == "m" and body["max_tokens"] == 1 for body in seen)


@pytest.mark.parametrize("refusal", [400, {"choices": [{"text": "…", "logprobs": None}]}])
def test_a_server_that_does_not_echo_is_asked_in_the_other_way_ever_after(refusal):
    with served(lambda body: refusal if "echo" in body else vllm(body)) as (scorer, seen):
        check(scorer)
        check(scorer)
    assert sum("echo" in body for body in seen) == 1


def test_a_server_without_log_probs_of_prompts_is_told_from_one_that_is_busy(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)
    with (
        served(lambda body: {"choices": [{"text": "…"}]}) as (scorer, _),
        pytest.raises(MooredError, match="gives no log-probabilities of prompts"),
    ):
        scorer.score([REQUEST])
    states = iter([503, 429])
    with served(lambda body: next(states, None) or echoed(body)) as (scorer, _):
        check(scorer)
    with (
        served(lambda body: 404) as (scorer, seen),
        pytest.raises(MooredError, match=r"404.*check --endpoint"),
    ):
        scorer.score([REQUEST])
    assert len(seen) == 1
    with pytest.raises(MooredError, match="did not score"):
        nobody = EndpointConfig(url="http://127.0.0.1:9/v1", concurrency=1, timeout_s=1.0)
        EndpointScorer("m", nobody).score([REQUEST])


def test_the_command_scores_text_behind_a_server(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    rows = [{"prompt": f"Room {p}", "response": f"<think>{p} up</think>"} for p in (1, 2, 1, 2)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with served(echoed) as (scorer, seen):
        command = ["moored", "diagnose", str(file), "--model", "m", "--tokenizer", "nano", "--json"]
        monkeypatch.setattr(sys, "argv", [*command, "--endpoint", scorer.url])
        with pytest.raises(SystemExit) as left:
            main()
    assert not left.value.code
    (series,) = json.loads(capsys.readouterr().out)["environments"]
    report = series["looks"][0]["report"]
    assert (report["num_prompts"], report["num_reasonings"]) == (2, 4)
    # The fake sees only the last token, so reasoning does not depend on its prompt.
    assert report["mi_estimate"] == pytest.approx(0.0, abs=1e-9)
    assert report["p_values"]["retrieval_accuracy"] == 1.0
    assert all(body["model"] == "m" for body in seen)
