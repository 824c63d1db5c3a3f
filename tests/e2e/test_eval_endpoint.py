"""`moored eval --endpoint` as a user types it, against a server in a thread."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.warm import WarmProcess

KEY = "sk-very-secret"
# No torch: endpoints are for the slim install too.
COMMAND = """\
import sys
sys.modules["torch"] = None
from moored.cli.main import main
main()
"""


def launch(*arguments: object, **env: str) -> WarmProcess:
    words = ["eval", "org/model", *map(str, arguments)]
    return WarmProcess(words, code=COMMAND, env=env, slim=True)


def run_eval(*arguments: object, expect: int = 0, **env: str) -> tuple[str, str]:
    process = launch(*arguments, **env)
    out, err = process.communicate()
    assert process.returncode == expect, err
    return out, err


def test_an_oracle_wins_over_several_turns_and_the_key_arrives(chat_server):
    with chat_server.ChatServer(chat_server.oracle("sokoban", 6)) as server:
        arguments = ["--endpoint", server.url, "--env", "sokoban", "-n", 6, "--samples", 2]
        out, _ = run_eval(*arguments, "--json", OPENAI_API_KEY=KEY)
        shown, _ = run_eval(*arguments, OPENAI_API_KEY=KEY)
    found = json.loads(out)
    assert found["success_rate"] == 1.0 and found["num_errors"] == 0
    assert found["task_seeds"] == [2**40, 2**40 + 5] and found["seed"] == 0
    assert found["model"] == "org/model" and found["split"] == "validation"
    assert found["temperature"] == 0.5 and "temperature 0.5, validation tasks" in shown
    assert found["pass_at"] == {"1": 1.0, "2": 1.0}
    assert found["mean_reply_tokens"] == 7.0
    assert {seen.headers["Authorization"] for seen in server.seen} == {f"Bearer {KEY}"}
    assert shown.startswith("success 100.0%") and "turns of 7 tokens\npass@1 100.0%" in shown


def test_an_endpoint_can_play_pictures(chat_server):
    pytest.importorskip("PIL")
    env = "{name: sokoban, options: {view: image, tile_px: 8}}"
    with chat_server.ChatServer(
        chat_server.oracle("sokoban", 2, view="image", tile_px=8)
    ) as server:
        out, _ = run_eval("--endpoint", server.url, "--env", env, "-n", 2, "--json")
    assert json.loads(out)["success_rate"] == 1.0
    kinds = {part["type"] for seen in server.seen for part in seen.body["messages"][1]["content"]}
    assert kinds == {"text", "image_url"}


def test_trouble_on_the_way_costs_an_episode_at_most(chat_server):
    wins = chat_server.oracle("countdown", 8)
    troubles = {
        1: chat_server.error(429, "slow down", Retry_After="1"),
        2: chat_server.Answer(hangs=True),
        3: chat_server.Answer(b"<html>"),
        4: chat_server.Answer(drops=True),
        5: chat_server.error(400, "content filter"),
    }

    def answer(body, number):
        return troubles.get(number) or wins(body, number)

    with chat_server.ChatServer(answer) as server:
        arguments = ["--endpoint", server.url, "--env", "countdown", "-n", 8]
        out, err = run_eval(*arguments, "--timeout", 2, "--concurrency", 4)
    assert len(server.seen) >= 8 + 4  # a slow machine may miss the time limit once more
    assert out.startswith("success 100.0%") and "1 of 8 episodes ended in an error" in out
    assert "gave no reply: 400 Bad Request: content filter" in err and "asking again" in err


@pytest.mark.parametrize(
    ("status", "message", "line"),
    [
        (401, f"bad key {KEY}", "refuses the API key: 401 Unauthorized: bad key ***; put"),
        (404, "no such model", "no such model; its list of models lacks 'org/model', did you mean"),
        (400, "no seeds", "gave no reply: 400 Bad Request: no seeds"),
    ],
)
def test_an_endpoint_that_refuses_is_one_helpful_line(chat_server, status, message, line):
    refusal = chat_server.error(status, message)
    models = ["org/model" if status == 400 else "org/model-7b"]
    with chat_server.ChatServer(lambda *_: refusal, models=models) as server:
        arguments = ["--endpoint", server.url, "--env", "bandit", "--api-key-env", "MY_KEY"]
        out, err = run_eval(*arguments, expect=2, MY_KEY=KEY)
    assert line in err and len(err.splitlines()) == 1
    assert KEY not in err + out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1", "--env", "bandit"], "no server answers at http"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "give --env"),
        (["--endpoint", "localhost", "--env", "bandit"], "must look like http://host:8000/v1"),
        (
            ["--endpoint", "http://h/v1", "--env", "bandit", "--api-key-env", "NONE"],
            "'NONE' is not",
        ),
    ],
)
def test_mistakes_are_one_helpful_line(arguments, line):
    _, err = run_eval(*arguments, expect=2)
    assert line in err and len(err.splitlines()) == 1


def test_ctrl_c_ends_an_evaluation_whose_server_hangs(chat_server):
    with chat_server.ChatServer(lambda *_: chat_server.Answer(hangs=True)) as server:
        process = launch("--endpoint", server.url, "--env", "bandit", "-n", 4)
        while len(server.seen) < 4 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode not in (0, 2) and "Traceback" not in err
