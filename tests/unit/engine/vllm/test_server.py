"""The sampler over a server, with a program that stands for vLLM's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moored.config import ConfigError, load_config  # noqa: E402
from moored.engine.base import Request, SamplingParams, write_replies  # noqa: E402
from moored.engine.vllm import server, support, watch  # noqa: E402
from moored.engine.vllm.sampler import vllm_sampler  # noqa: E402
from moored.engine.vllm.server import ServerSampler  # noqa: E402
from moored.engine.workers.team import WorkerLost  # noqa: E402
from moored.errors import MooredError  # noqa: E402
from moored.types import FinishReason, Prompt  # noqa: E402
from tests.unit.engine.vllm import fake_server  # noqa: E402
from tests.unit.engine.vllm.test_sampler import tiny_model  # noqa: E402

PARAMS = SamplingParams(max_tokens=4, temperature=0.7, stop_ids=(12,))


def request(session: int, *ids: int) -> Request:
    return Request(session=session, prompt=Prompt(np.array(ids)), seed=2**62 + session)


def options(*words: str):
    words = ("engine.sampler=vllm", "engine.device=cpu", "rollout.max_context=256", *words)
    return load_config({}, [*words, "rollout.max_response_tokens=8"])


@pytest.fixture
def running(monkeypatch) -> Iterator[str]:
    """The address of a server that runs already."""
    kind = type("Handler", (fake_server.Handler,), {})
    monkeypatch.setattr(fake_server, "Handler", kind)
    monkeypatch.setattr(fake_server, "STATE", {"weights": 0.0, "names": [], "calls": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def total(model) -> float:
    """Of all weights as they are written: the tied output layer is there too."""
    return float(sum(tensor.sum() for tensor in model.state_dict().values()))


def test_weights_go_as_files_with_the_tied_output_layer_and_the_cache_is_emptied(running, tmp_path):
    model = tiny_model()
    config = options(f"engine.vllm.server={running}", f"engine.vllm.folder={tmp_path}")
    sampler = vllm_sampler(model, config)
    (reply,) = write_replies(sampler, [request(1, 20)], PARAMS)
    assert reply.logprobs == pytest.approx([total(model)] * 4, rel=1e-4)
    assert "lm_head.weight" in fake_server.STATE["names"]
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    sampler.load_weights(model.state_dict().items(), 5)
    (reply,) = write_replies(sampler, [request(2, 20)], PARAMS)
    assert reply.logprobs == pytest.approx([total(model)] * 4, rel=1e-4)
    assert reply.policy_version == 5
    paths = [path for path, _ in fake_server.STATE["calls"]]
    taken = ["/collective_rpc", "/reset_prefix_cache"]
    assert paths == [*taken, "/v1/completions", *taken, "/v1/completions"]
    # Earlier weights are gone, and in the end all.
    assert len(list(tmp_path.iterdir())) == 1
    sampler.close()
    assert list(tmp_path.iterdir()) == []


def test_ids_go_in_and_ids_and_the_stop_token_come_out_of_a_server(running):
    sampler = vllm_sampler(tiny_model(), options(f"engine.vllm.server={running}"))
    stopped, cut = write_replies(sampler, [request(1, 10, 3), request(2, 20)], PARAMS)
    assert stopped.token_ids.tolist() == [10, 11, 12]
    assert stopped.finish_reason is FinishReason.STOP
    assert cut.token_ids.tolist() == [20, 21, 22, 23]
    assert cut.finish_reason is FinishReason.LENGTH
    bodies = [b for path, b in fake_server.STATE["calls"] if path == "/v1/completions"]
    assert sorted(body["seed"] - 2**62 for body in bodies) == [1, 2]
    assert all(body["model"] == "served" and body["ignore_eos"] for body in bodies)
    sampler.close()


def test_an_error_of_one_reply_is_its_own(running):
    sampler = vllm_sampler(tiny_model(), options(f"engine.vllm.server={running}"))
    lost, fine = write_replies(sampler, [request(1, 13), request(2, 20)], PARAMS)
    assert lost.finish_reason is FinishReason.ERROR and "out of luck" in lost.error
    assert fine.finish_reason is FinishReason.LENGTH
    sampler.close()


def test_a_server_that_cannot_be_used_is_refused_before_the_model_is_loaded(running, monkeypatch):
    config = options(f"engine.vllm.server={running}")
    support.check_vllm(config)
    monkeypatch.setattr(fake_server.Handler, "version", "0.20.1")
    with pytest.raises(MooredError, match=r"needs vLLM 0\.22 or newer, but this is 0\.20\.1"):
        support.check_vllm(config)
    monkeypatch.setattr(fake_server.Handler, "version", "0.32.0")
    monkeypatch.setattr(fake_server.Handler, "is_for_development", False)
    with pytest.raises(MooredError, match="takes no weights; start vLLM with VLLM_SERVER_DEV_MODE"):
        support.check_vllm(config)
    with pytest.raises(MooredError, match=r"no vLLM server answers at http://127\.0\.0\.1:9: "):
        support.check_vllm(options("engine.vllm.server=http://127.0.0.1:9"))


def test_a_server_with_too_short_a_context_is_refused(running):
    config = options(f"engine.vllm.server={running}", "rollout.max_context=300")
    with pytest.raises(MooredError, match=r"takes 256 tokens, but 300 .* --max-model-len 300"):
        vllm_sampler(tiny_model(), config)


def test_weights_that_the_server_does_not_see_are_told(running, monkeypatch):
    monkeypatch.setattr("moored.engine.vllm.server.write_weights", lambda *_: None)
    with pytest.raises(MooredError, match=r"did not take the weights .*\(engine\.vllm\.folder\)"):
        vllm_sampler(tiny_model(), options(f"engine.vllm.server={running}"))


def test_an_address_or_start_is_asked_for():
    with pytest.raises(ConfigError, match=r"engine\.vllm\.server"):
        options("engine.vllm.server=localhost")


def test_ranks_have_no_server(running):
    config = options(f"engine.vllm.server={running}")
    with pytest.raises(MooredError, match="every rank and replica has a vLLM of its own"):
        support.check_vllm(config, in_ranks=True)


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """Servers that are started are the fake; those that were."""
    made: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def start(words, **rest):
        place = words.index("vllm.entrypoints.openai.api_server")
        # A file instead of a module: `-m` goes.
        made.append(popen([*words[: place - 1], fake_server.__file__, *words[place + 1 :]], **rest))
        return made[-1]

    monkeypatch.setattr(server.subprocess, "Popen", start)
    return made


def test_a_started_server_ends_with_its_sampler(started):
    sampler = vllm_sampler(tiny_model(), options("engine.vllm.server=start"))
    assert isinstance(sampler, ServerSampler)
    assert len(write_replies(sampler, [request(1, 20)], PARAMS)[0].token_ids) == 4
    folder, url = sampler._folder, sampler._client.url  # pyright: ignore
    words = started[0].args
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert words[words.index("--max-model-len") + 1] == "256"
    sampler.close()
    assert started[0].returncode is not None and not folder.exists()
    with pytest.raises(OSError, match="refused"):
        urlopen(f"{url}/version")


def test_a_server_that_does_not_start_tells_its_last_errors(started, monkeypatch):
    monkeypatch.setattr(server, "engine_options", lambda config: {"fails": True})
    with pytest.raises(MooredError, match=r"ended with code 1: .*no such model \| .*engine died"):
        vllm_sampler(tiny_model(), options("engine.vllm.server=start"))


def test_a_killed_server_ends_the_rollout_with_a_sentence(started):
    sampler = vllm_sampler(tiny_model(), options("engine.vllm.server=start"))
    assert isinstance(sampler, ServerSampler)
    pid = started[0].pid
    watched = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    started[0].kill()
    started[0].wait()
    for child in watched:
        os.kill(int(child), signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"the vLLM server ended with code -9"):
        sampler.take(support.HttpError("connection refused", is_unreachable=True), 1)
    sampler.close()


def test_what_is_watched_ends_when_the_one_who_started_it_is_killed(tmp_path):
    told = tmp_path / "pid"
    sleeper = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid()))"
    words = [sys.executable, "-c", f"{sleeper}; time.sleep(600)"]
    start = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-m', "
    start += f"{watch.__name__!r}, *{words!r}], stdin=subprocess.PIPE); time.sleep(600)"
    root = Path(__file__).parents[4]
    parent = subprocess.Popen([sys.executable, "-c", start], cwd=root)
    while not (told.is_file() and told.read_text()):
        time.sleep(0.02)
    pid = int(told.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    while _is_alive(pid):
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; in a container nothing may collect it.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.is_file() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_exit_code_of_what_is_watched_is_passed_on(tmp_path):
    words = [sys.executable, "-m", watch.__name__, sys.executable, "-c", "import sys; sys.exit(3)"]
    root = Path(__file__).parents[4]
    with subprocess.Popen(words, stdin=subprocess.PIPE, cwd=root) as process:
        assert process.wait() == 3
