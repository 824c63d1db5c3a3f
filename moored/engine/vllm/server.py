"""Sampler on a vLLM server: a process of its own, on this machine or another.

Requests go over HTTP, ids in and ids out. Weights go as files: a folder is written whole, then the
server reads it in place. `engine.vllm.server` names a server that runs already, or has one started.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from moored.config import Config
from moored.engine.base import Request, SamplingParams, check_params, check_text_prompt
from moored.engine.endpoint.sampler import EndpointStream
from moored.engine.vllm.files import file_dtype, write_weights
from moored.engine.vllm.support import SETTINGS, described, engine_options, look_up_server
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError
from moored.json_http import HttpError, JsonClient
from moored.runlog.log import written_whole
from moored.types import Completion, FinishReason

START_S = 900.0
"""How long a server may take to start: on a GPU it compiles."""
WAIT_S = 0.2
REPLY_S = 600.0
CONCURRENCY = 256
"""Requests at a time; vLLM itself writes as many replies by default."""
NAME = "moored"
"""What the model of a started server is called."""
LOG = "server.log"
LAST_LINES = 3


class ServerSampler:
    """Writes replies through a vLLM server, which has the weights of the last `load_weights`."""

    def __init__(self, model: torch.nn.Module, config: Config) -> None:
        self.version = 0
        self.concurrency = CONCURRENCY
        self.has_answered = True
        """It was asked for its model before the first request."""
        self._config = config
        self._dtype = file_dtype(config)
        self._described = described(model)
        self._has_own_folder = config.engine.vllm.folder is None
        self._folder = Path(config.engine.vllm.folder or tempfile.mkdtemp(prefix="moored-vllm-"))
        self._weights: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._client: JsonClient | None = None
        self._name, self._max_context = NAME, 0

    def stream(self, params: SamplingParams) -> EndpointStream:
        check_params(params)
        return EndpointStream(self, params)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write the weights to a folder and have the server read it."""
        folder = self._folder / f"weights_{version:06d}_{time.time_ns()}"
        with written_whole(folder) as place:
            write_weights(weights, place, self._described, self._dtype)
        if self._client is None:
            self._connect(folder)
        # Also by a server that was started from this folder: so this way is checked before a run.
        self._reload(folder)
        if self._weights is not None:
            shutil.rmtree(self._weights, ignore_errors=True)
        self._weights, self.version = folder, version

    def _connect(self, folder: Path) -> None:
        url = self._config.engine.vllm.server
        if url == "start":
            port = _free_port()
            self._process = _start(self._config, folder, port, self._folder / LOG)
            url = f"http://127.0.0.1:{port}"
            self._wait(url)
        assert url is not None
        found = look_up_server(url)
        self._name, self._max_context = found["id"], int(found["max_model_len"])
        self._check_length(self._config.rollout.max_context)
        self._client = JsonClient(url, api_key=None, timeout_s=REPLY_S)

    def _wait(self, url: str) -> None:
        """Until the server that was started answers."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        with closing(JsonClient(url, api_key=None, timeout_s=REPLY_S)) as client:
            while True:
                try:
                    client.get("/v1/models")
                    return
                except HttpError as error:
                    if self._process.poll() is not None:
                        raise MooredError(self._why_ended()) from None
                    if time.monotonic() > deadline:
                        raise MooredError(
                            f"the vLLM server has not started within {START_S:g} s: {error}; see "
                            f"{str(self._folder / LOG)!r}"
                        ) from None
                    time.sleep(WAIT_S)

    def _check_length(self, needed: int) -> None:
        if needed > self._max_context:
            raise MooredError(
                f"the vLLM server takes {self._max_context} tokens, but {needed} are needed; start "
                f"it with --max-model-len {needed}, or lower rollout.max_context"
            )

    def _reload(self, folder: Path) -> None:
        assert self._client is not None
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        try:
            self._client.tell("/collective_rpc", asked)
            self._client.tell("/reset_prefix_cache", {})
        except HttpError as error:
            if self._has_ended():
                raise WorkerLost(self._why_ended()) from None
            raise MooredError(
                f"the vLLM server did not take the weights of {str(folder)!r} over: {error}; it "
                f"has to see this folder (engine.vllm.folder) and serve the same model"
            ) from None

    def ask(self, request: Request, params: SamplingParams, stop: threading.Event) -> Completion:
        """One reply; called in threads of a stream."""
        check_text_prompt(request.prompt)
        self._check_length(len(request.prompt.ids) + params.max_tokens)
        assert self._client is not None, "load_weights comes first"
        body = {
            "model": self._name,
            "prompt": request.prompt.ids.tolist(),
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": request.seed,
            "stop_token_ids": list(params.stop_ids),
            # Only what the request names ends a reply.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return _completion(self._client.post("/v1/completions", body), self.version)

    def take(self, outcome: Completion | Exception, num_first: int) -> Completion:
        """The completion of one request; raises what ends the rollout."""
        if isinstance(outcome, Completion):
            return outcome
        if not isinstance(outcome, HttpError):
            raise outcome
        if self._has_ended():
            raise WorkerLost(self._why_ended())
        if outcome.is_unreachable or not outcome.is_transient:
            raise MooredError(f"the vLLM server refuses a request: {outcome.with_remedy()}")
        nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return Completion(*nothing, FinishReason.ERROR, self.version, error=str(outcome))

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _why_ended(self) -> str:
        assert self._process is not None
        lines = (self._folder / LOG).read_text(errors="replace").splitlines()
        told = [line.strip() for line in lines if "Error" in line][-LAST_LINES:]
        return (
            f"the vLLM server ended with code {self._process.returncode}: "
            f"{' | '.join(told) or 'it named no error'}; then resume the run"
        )

    def close(self) -> None:
        """End the server, if it was started here, and remove the weights."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
        left = self._folder if self._has_own_folder else self._weights
        if left is not None:
            shutil.rmtree(left, ignore_errors=True)


def _completion(answer: object, version: int) -> Completion:
    try:
        (choice,) = answer["choices"]  # pyright: ignore[reportIndexIssue]
        ids = np.array(choice["token_ids"], dtype=np.int64)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
        is_stop = choice["finish_reason"] == "stop"
    except (KeyError, TypeError, ValueError) as error:
        raise MooredError(
            f"the vLLM server's answer holds no reply as ids with log-probabilities ({error!r}); "
            f"serve with vLLM 0.22 or newer"
        ) from None
    if not np.isfinite(logprobs).all():
        raise MooredError(
            "the model's log-probabilities are not finite: its weights are damaged; go back to "
            "an earlier checkpoint"
        )
    reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
    return Completion(ids, logprobs, reason, version)


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def _start(config: Config, folder: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """A server of this machine that ends with this process."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in engine_options(config).items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    # It takes weights over, and its engine is a process of its own.
    env = {**SETTINGS, **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "moored.engine.vllm.watch", *words],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
        )
