"""Without a network a hub id fails at once, and what was downloaded before still loads."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from huggingface_hub import constants
from transformers import AutoTokenizer

from moored.errors import MooredError
from moored.models.hub import hub_answers
from moored.models.load import load_model

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[str]:
    """Answers every request with 501."""
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    thread.join()
    web.server_close()


def test_a_hub_that_answers_anything_is_there(monkeypatch, server):
    monkeypatch.setattr(constants, "ENDPOINT", server)
    assert hub_answers()


def test_a_hub_that_cannot_be_reached_is_not_there(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    assert not hub_answers()


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
def test_that_is_seen_with_every_client_that_releases_of_the_hub_have(monkeypatch, name):
    client = pytest.importorskip(name)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    with client.Client() as session:
        monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
        assert not hub_answers()


def test_without_the_hub_only_files_are_looked_for_and_nothing_is_tried_again(monkeypatch):
    asked = []

    def look(name, *, local_files_only, trust_remote_code):
        asked.append((name, local_files_only, trust_remote_code))
        raise OSError("We couldn't connect. And more advice.")

    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", look)
    with pytest.raises(MooredError, match="couldn't connect; check its name and the connection"):
        load_model("org/none", torch.device("cpu"))
    assert asked == [("org/none", True, False)]
