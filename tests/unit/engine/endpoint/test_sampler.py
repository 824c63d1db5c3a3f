"""An endpoint's replies and failures, over real HTTP to a server in a thread."""

from __future__ import annotations

import base64
import io
import logging
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moored.config import load_config
from moored.config_engine import EndpointConfig
from moored.engine.base import Request, SamplingParams, write_replies
from moored.engine.endpoint.chat_api import message_to_json
from moored.engine.endpoint.sampler import NUM_ATTEMPTS, EndpointSampler, TextRenderer, read_api_key
from moored.envs.mix import EnvMix
from moored.errors import MooredError
from moored.evaluate import Evaluation, evaluate
from moored.json_http import server_message
from moored.types import Completion, FinishReason, Message, Prompt

KEY = "sk-very-secret"
GOOD = "<think>I see.</think><answer>Up</answer>"


def requests(*texts: str) -> list[Request]:
    prompt = Prompt(np.zeros(0, dtype=np.int64))
    return [
        Request(session=i, prompt=prompt, seed=(1 << 40) + i, messages=(Message("user", text),))
        for i, text in enumerate(texts)
    ]


def ask(server, *texts: str, **options) -> list[Completion]:
    params = SamplingParams(max_tokens=9)
    return write_replies(sampler(server.url, **options), requests(*texts), params)


def sampler(
    url: str, *, api_key: str | None = None, first_pause_s: float = 0.001, **options
) -> EndpointSampler:
    server = EndpointConfig(url=url, **{"timeout_s": 60.0, **options})
    return EndpointSampler("org/model", server, api_key=api_key, first_pause_s=first_pause_s)


def evaluated(endpoint: EndpointSampler, env: str, num_tasks: int) -> Evaluation:
    config = load_config(
        {
            "env": env,
            "evaluation": {"num_tasks": num_tasks, "temperature": 0.0},
            "rollout": {"max_response_tokens": 9, "max_context": sys.maxsize},
        }
    )
    writer: Any = SimpleNamespace(sampler=endpoint, renderer=TextRenderer())
    return evaluate(writer, EnvMix(config.env), config)


def text_of(completion: Completion) -> str:
    return TextRenderer().decode(completion.token_ids)


def said(body: dict) -> str:
    return body["messages"][-1]["content"]


@pytest.fixture
def serve(chat_server):
    """Start servers that are closed at the end."""
    servers = []

    def start(answer, **options):
        servers.append(chat_server.ChatServer(answer, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_request_carries_the_dialogue_and_the_reply_comes_back(chat_server, serve):
    server = serve(lambda body, _: chat_server.reply(f"you said {said(body)}"))
    params = SamplingParams(max_tokens=9, temperature=0.25)
    found = write_replies(
        sampler(f"{server.url}/", api_key=f"{KEY}\n"), requests("é", "ab"), params
    )
    assert [text_of(completion) for completion in found] == ["you said é", "you said ab"]
    assert found[0].token_ids.tolist() == [ord(char) for char in "you said é"]
    assert np.isnan(found[0].logprobs).all()
    assert found[0].finish_reason is FinishReason.STOP
    first = next(seen for seen in server.seen if said(seen.body) == "ab")
    assert first.path == "/v1/chat/completions"
    assert first.headers["Authorization"] == f"Bearer {KEY}"
    assert first.body == {
        "model": "org/model",
        "messages": [{"role": "user", "content": "ab"}],
        "temperature": 0.25,
        "max_tokens": 9,
        "seed": 1,  # (2**40 + 1) mod 2**31
    }


def test_without_a_key_none_is_sent(chat_server, serve):
    server = serve(lambda *_: chat_server.reply("x"))
    ask(server, "a")
    assert "Authorization" not in server.seen[0].headers


@pytest.mark.parametrize(
    "trouble",
    [
        {"status": 429},
        {"status": 503},
        {"drops": True},
        {"hangs": True},
        {"body": b"<html>busy</html>"},
        {"body": {"choices": []}},
        {"body": {"choices": [{"message": {"content": ["a", "b"]}}]}},
        {"body": [1]},
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again(chat_server, serve, trouble, caplog):
    bad = chat_server.Answer(**trouble)
    server = serve(lambda _, number: bad if number < 2 else chat_server.reply("fine"))
    (completion,) = ask(server, "a", timeout_s=1.0 if bad.hangs else 60.0)
    assert text_of(completion) == "fine"
    assert len(server.seen) == 3 or bad.hangs  # a slow machine may miss the time limit once more
    assert caplog.text.count("asking again") == 1  # of two retries


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Seconds that samplers meant to wait before they asked again; they do not wait."""
    meant: list[float] = []
    pause_s = EndpointSampler._pause_s

    def note(*args) -> float:
        meant.append(pause_s(*args))
        return 0.0

    monkeypatch.setattr(EndpointSampler, "_pause_s", note)
    return meant


def test_retry_after_comes_on_top_of_a_pause_that_doubles(chat_server, serve, pauses):
    busy = [chat_server.error(429, "slow down", Retry_After="5"), chat_server.error(503, "wait")]
    server = serve(lambda _, number: (busy * 2)[number] if number < 3 else chat_server.reply("x"))
    ask(server, "a", first_pause_s=1.0)
    # Pauses of 1, 2 and 4 s, each times a jitter of 0.5 to 1.
    bounds = [(5.5, 6.0), (1.0, 2.0), (7.0, 9.0)]
    assert all(low <= pause <= high for pause, (low, high) in zip(pauses, bounds, strict=True))


def test_a_request_that_keeps_failing_fails_alone(chat_server, serve):
    def answer(body, _):
        text = said(body)
        if text == "busy":
            return chat_server.error(500, "no memory")
        return chat_server.error(400, "too long") if text == "long" else chat_server.reply("fine")

    server = serve(answer)
    found = ask(server, "a", "busy", "long", "b")
    error = FinishReason.ERROR
    assert [c.finish_reason is error for c in found] == [False, True, True, False]
    assert found[1].error == "500 Internal Server Error: no memory"
    assert found[2].error == "400 Bad Request: too long"
    assert len(found[1].token_ids) == 0
    asked = [said(seen.body) for seen in server.seen]
    assert (asked.count("busy"), asked.count("long")) == (NUM_ATTEMPTS, 1)


def test_when_the_first_requests_all_fail_the_rest_are_not_asked(chat_server, serve):
    server = serve(lambda *_: chat_server.error(400, "temperature must be 1"))
    with pytest.raises(MooredError, match="gave no reply: 400 Bad Request: temperature must be 1"):
        ask(server, *map(str, range(400)), concurrency=2)
    assert len(server.seen) < 300  # threads may send a few more before they stop


@pytest.mark.parametrize(("key", "what"), [(None, "asks for an API key"), (KEY, "refuses the API")])
def test_a_wrong_key_stops_at_once_and_is_never_shown(chat_server, serve, key, what):
    server = serve(lambda *_: chat_server.error(401, f"bad key \x1b[31m {KEY}"))
    with pytest.raises(MooredError, match=what) as caught:
        ask(server, "a", api_key=key, concurrency=1)
    assert "--api-key-env" in str(caught.value) and "\x1b" not in str(caught.value)
    assert key is None or KEY not in f"{caught.value}{caught.value.__cause__!r}"
    assert len(server.seen) == 1


def test_an_unknown_model_gets_a_close_match_from_the_server(chat_server, serve):
    missing = chat_server.error(404, "The model `org/model` does not exist.")
    server = serve(lambda *_: missing, models=["org/model-7b", "other"])
    with pytest.raises(MooredError, match=r"does not exist\..*did you mean 'org/model-7b'\?"):
        ask(server, "a")
    server.models = []
    with pytest.raises(MooredError, match="mostly ends in /v1"):
        ask(server, "a")


def test_a_server_that_is_not_there_stops_at_once(pauses):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(MooredError, match=f"no server answers at http://127.0.0.1:{port}/v1"):
        there = sampler(f"http://127.0.0.1:{port}/v1")
        write_replies(there, requests("a"), SamplingParams(max_tokens=9))
    assert pauses == []


def test_after_an_answer_nothing_raises_any_more(chat_server, serve):
    server = serve(lambda _, n: chat_server.error(401, "expired") if n else chat_server.reply("x"))
    found = ask(server, "a", "b", "c", concurrency=1)
    reasons = [FinishReason.STOP, FinishReason.ERROR, FinishReason.ERROR]
    assert [completion.finish_reason for completion in found] == reasons


def test_a_reply_that_hangs_does_not_hold_up_an_error(chat_server, serve):
    hang, wrong = chat_server.Answer(hangs=True), chat_server.error(401, "no")
    server = serve(lambda body, _: hang if said(body) == "a" else wrong)
    with pytest.raises(MooredError, match="API key"):
        ask(server, "a", "b", timeout_s=60.0)
    # If the sampler had waited for it, it would have asked again.
    assert [said(seen.body) for seen in server.seen].count("a") <= 1


def test_newer_models_get_the_limit_under_the_name_they_ask_for(chat_server, serve):
    refusal = chat_server.error(400, "Use 'max_completion_tokens' instead of 'max_tokens'.")
    server = serve(lambda body, _: refusal if "max_tokens" in body else chat_server.reply("x"))
    found = ask(server, "a", "b", concurrency=1)
    assert [text_of(completion) for completion in found] == ["x", "x"]
    limits = [{k: v for k, v in seen.body.items() if k.startswith("max")} for seen in server.seen]
    assert limits == [{"max_tokens": 9}, *[{"max_completion_tokens": 9}] * 2]


def test_redirects_are_not_followed_because_the_key_would_go_along(chat_server, serve):
    other = serve(lambda *_: chat_server.reply("x"))
    moved = chat_server.Answer(status=302, headers={"Location": other.url})
    with pytest.raises(MooredError, match=f"302 Found: {other.url}"):
        ask(serve(lambda *_: moved), "a", api_key=KEY)
    assert not other.seen and not other.num_lookups


def test_as_many_requests_are_under_way_as_allowed(chat_server, serve):
    meeting, lock, under_way = threading.Barrier(3, timeout=60), threading.Lock(), [0, 0]

    def answer(*_):
        with lock:
            under_way[0] += 1
            under_way[1] = max(under_way)
        meeting.wait()
        with lock:
            under_way[0] -= 1
        return chat_server.reply("x")

    ask(serve(answer), *"abcdef", concurrency=3)
    assert under_way == [0, 3]


def test_a_reply_is_handed_over_while_others_are_still_written(chat_server, serve):
    second = threading.Event()

    def answer(body, _):
        if said(body) == "slow":
            second.wait(10)
        return chat_server.reply(said(body))

    stream = sampler(serve(answer).url).stream(SamplingParams(max_tokens=9))
    slow, fast = requests("slow", "fast")
    stream.submit(slow)
    stream.submit(fast)
    assert [session for session, _ in stream.poll()] == [1]
    assert stream.poll(wait_s=0.01) == []
    second.set()
    assert [(s, text_of(reply)) for s, reply in stream.poll()] == [(0, "slow")]
    assert stream.poll() == []
    stream.close()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_found_under_either_name(chat_server, serve, name):
    server = serve(lambda *_: chat_server.reply("<answer>Up</answer>", **{name: "I see."}))
    assert text_of(ask(server, "a")[0]) == GOOD


def test_a_reply_without_content_is_empty_and_a_cut_one_says_so(chat_server, serve):
    cut = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    (completion,) = ask(serve(lambda *_: chat_server.Answer(cut)), "a")
    assert text_of(completion) == "" and completion.finish_reason is FinishReason.LENGTH


def test_images_go_as_data_uris_with_the_same_pixels():
    image_module = pytest.importorskip("PIL.Image")
    picture = image_module.new("RGB", (2, 1), (10, 20, 30))
    sent = message_to_json(
        Message("user", [{"type": "text", "text": "See"}, {"type": "image", "image": picture}])
    )
    text, image = sent["content"]  # pyright: ignore[reportGeneralTypeIssues]
    assert text == {"type": "text", "text": "See"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert image["type"] == "image_url" and head == "data:image/png;base64"
    with image_module.open(io.BytesIO(base64.b64decode(data))) as back:
        assert back.tobytes() == bytes([10, 20, 30, 10, 20, 30])


def test_an_oracle_behind_an_endpoint_wins_every_game(chat_server, serve):
    server = serve(chat_server.oracle("sokoban", 4))
    endpoint = sampler(server.url)
    found = evaluated(endpoint, "sokoban", 4)
    assert (found.success_rate, found.validity_rate, found.num_errors) == (1.0, 1.0, 0)
    assert endpoint.mean_reply_tokens == 7.0


def test_an_episode_whose_reply_is_lost_is_counted_apart(chat_server, serve, caplog):
    wins = chat_server.oracle("countdown", 4)
    lost = chat_server.error(400, "content filter")
    server = serve(lambda body, number: lost if number == 2 else wins(body, number))
    with caplog.at_level(logging.WARNING):
        found = evaluated(sampler(server.url, concurrency=1), "countdown", 4)
    assert (found.success_rate, found.num_errors, found.mean_turns) == (1.0, 1, 0.75)
    assert "turn 0: the sampler gave no reply: 400 Bad Request: content filter" in caplog.text


def test_tokens_that_the_server_does_not_count_are_not_guessed(chat_server, serve):
    uncounted = {"choices": [{"message": {"content": "x"}}]}
    endpoint = sampler(serve(lambda *_: chat_server.Answer(uncounted)).url)
    evaluated(endpoint, "bandit", 2)
    assert endpoint.mean_reply_tokens is None


def test_characters_stand_for_tokens_and_the_stream_only_grows():
    renderer = TextRenderer()
    first = renderer.start([Message("system", "S"), Message("user", "Q")])
    ids = np.array([ord(char) for char in GOOD])
    assert renderer.decode(ids) == GOOD
    spans = renderer.spans(ids, GOOD)
    assert spans.think is not None and spans.answer is not None
    assert renderer.decode(ids[slice(*spans.think)]) == "I see."
    assert renderer.decode(ids[slice(*spans.answer)]) == "Up"
    after = renderer.extend(first, ids, GOOD, [{"type": "image", "image": None}], [])
    assert renderer.decode(after.ids) == (
        f"system: S\n\nuser: Q\n\nassistant: {GOOD}\n\nuser: [image]\n\nassistant: "
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "m"}}', "m"),
        ('{"object": "error", "message": "m"}', "m"),
        ('{"detail": "m"}', "m"),
        ('{"error": "m"}', "m"),
        ('{"detail": [{"loc": 1}]}', '{"detail": [{"loc": 1}]}'),
        ("<p>m</p>", "<p>m</p>"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_the_message_is_found_in_any_error_body(body, message):
    assert server_message(body) == message


@pytest.mark.parametrize("url", ["host:8000/v1", "file:///etc/passwd", "http://", "http://h:x/v1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(MooredError, match="must look like http://host:8000/v1"):
        sampler(url)


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(MooredError, match="password; leave it out") as caught:
        sampler(f"http://me:{KEY}@host/v1")
    assert KEY not in str(caught.value)


def test_a_key_no_header_can_carry_is_refused_and_not_repeated():
    with pytest.raises(MooredError, match="no HTTP header") as caught:
        sampler("http://host/v1", api_key="sk-\nsecret")
    assert "secret" not in str(caught.value)


def test_only_a_key_asked_for_by_name_must_exist(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OTHER_KEY", raising=False)
    assert read_api_key() is None
    with pytest.raises(MooredError, match="'OTHER_KEY' is not set"):
        read_api_key("OTHER_KEY")
    monkeypatch.setenv("OTHER_KEY", KEY)
    assert read_api_key("OTHER_KEY") == KEY
