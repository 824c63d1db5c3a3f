"""The shop as a web page: a person buys in a real process, and nobody else gets in."""

from __future__ import annotations

import html
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from moored.cli.main import main
from moored.envs.webshop.env import WebShop

pytest.importorskip("starlette", reason="needs moored[serve]")
pytest.importorskip("uvicorn", reason="needs moored[serve]")

ROOT = Path(__file__).parents[4]
ENTRY = "from moored.cli.main import main; main()"


@contextmanager
def served(*words: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A browser at the page of a new process, which is ended with the block."""
    command = [sys.executable, "-c", ENTRY, "play", "webshop", "--web", "--port", "0", *words]
    environ, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address is not None, line
        with httpx.Client(base_url=address[0], follow_redirects=True) as browser:
            yield browser, process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def browser() -> Iterator[httpx.Client]:
    with served("-o", "num_products=60", "-o", "max_turns=1000") as (browser, _):
        yield browser


def read(response: httpx.Response) -> str:
    assert response.status_code == 200
    return html.unescape(response.text)


def test_a_person_searches_chooses_and_buys_and_ctrl_c_ends_it() -> None:
    env = WebShop(num_products=60)
    env.reset(3)
    with served("-o", "num_products=60", "--seed", "3") as (browser, process):
        page = read(browser.get("/"))
        assert env.goal.instruction in page and "Turn 1 of 10" in page
        while True:
            verb, _, argument = env.oracle().removesuffix("]").partition("[")
            field = "keywords" if verb == "search" else "button"
            result = env.step(f"<think></think><answer>{verb}[{argument}]</answer>")
            page = read(browser.post(f"/{verb}", data={field: argument}))
            # The page quotes what the model reads, word for word.
            assert str(result.observation) in page
            if result.is_over:
                break
        assert "Just what was asked for" in page and '<p class="big">1.00</p>' in page
        assert "Task 4" in read(browser.post("/new"))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_every_page_of_the_shop_can_be_seen(browser: httpx.Client) -> None:
    browser.post("/new")
    assert "What are you looking for?" in read(browser.get("/"))
    page = read(browser.post("/search", data={"keywords": "red shoes"}))
    assert "results for “red shoes”" in page and "Page 1 of" in page
    (asin, *_) = re.findall(r'value="(B0\w+)"', page)
    assert "Page 2 of" in read(browser.post("/click", data={"button": "Next >"}))
    browser.post("/click", data={"button": "< Prev"})
    page = read(browser.post("/click", data={"button": asin}))
    assert "Buy Now" in page and asin in page
    value = re.findall(r'value="([^"]+)" aria-pressed="false"', page)[0]
    page = read(browser.post("/click", data={"button": value}))
    assert f'value="{value}" aria-pressed="true"' in page
    for name in ("Description", "Features", "Reviews"):
        assert f"<h1>{name}</h1>" in read(browser.post("/click", data={"button": name}))
        browser.post("/click", data={"button": "< Prev"})
    page = read(browser.post("/click", data={"button": "Back to Search"}))
    assert "What are you looking for?" in page
    page = read(browser.post("/click", data={"button": "Buy Now"}))
    assert "That button is not on this page; the turn is used up." in page


def test_what_a_person_types_is_shown_as_text(browser: httpx.Client) -> None:
    attack = '"><script>alert(1)</script>'
    response = browser.post("/search", data={"keywords": attack})
    assert "<script" not in response.text and "&lt;script&gt;" in response.text
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.findall(r'(?:src|href)="(?!/)', response.text)
    assert browser.get("/style.css").headers["content-type"].startswith("text/css")


def test_other_sites_and_other_hosts_are_refused(browser: httpx.Client) -> None:
    assert browser.get("/", headers={"host": "evil.example"}).status_code == 400
    other = {"origin": "http://evil.example"}
    assert browser.post("/new", headers=other).status_code == 403
    own = {"origin": str(browser.base_url).rstrip("/")}
    assert browser.post("/search", data={"keywords": "a b"}, headers=own).status_code == 200


def test_forms_without_their_field_or_with_broken_text_use_up_no_turn(
    browser: httpx.Client,
) -> None:
    browser.post("/new")
    for path, body in (("/click", b""), ("/search", b"keywords=+"), ("/click", b"\xff\xfe")):
        assert "Turn 1 of" in read(browser.post(path, content=body))
    page = read(browser.post("/search", content=b"keywords=%ff%fe"))
    assert "Turn 2 of" in page


def test_the_end_of_the_turns_is_told() -> None:
    from starlette.testclient import TestClient

    with TestClient(
        WebShop(num_products=60, max_turns=1).web_app(), base_url="http://localhost"
    ) as browser:
        page = browser.post("/search", data={"keywords": "shoes"}).text
        assert "No turns left" in page and "nothing was bought" in page
        assert browser.post("/search", data={"keywords": "boots"}).text == page
        assert "Turn 1 of 1" in browser.post("/new").text


def test_a_port_in_use_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["moored", "play", "webshop", "--web", "--port", port])
        with pytest.raises(SystemExit) as stop:
            main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"moored: cannot listen on 127.0.0.1:{port}: ")
    assert error.count("\n") == 1
