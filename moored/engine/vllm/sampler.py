"""Sampler on vLLM, in this process: ids go in, ids and log-probabilities come out.

vLLM batches replies continuously and keeps the keys and values of earlier turns as cached
prefixes. Weights are taken over in place. On a GPU replies come as a stream; on a CPU all replies
of a batch are written before any is returned, so that runs repeat bit by bit.
"""

from __future__ import annotations

import importlib
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moored.config import Config
from moored.engine.base import (
    LockstepStream,
    Request,
    SamplingParams,
    Stream,
    check_params,
    check_requests,
    check_text_prompt,
    write_all,
)
from moored.engine.device import pick_device
from moored.engine.lora import plain_weights
from moored.engine.vllm.files import FileWriter
from moored.engine.vllm.server import ServerSampler
from moored.engine.vllm.support import (
    deaf_to_interrupts,
    described,
    engine_options,
    import_vllm,
)
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError
from moored.types import Completion, FinishReason

MORE_CACHE = "raise engine.vllm.memory_share (cache_gib on a CPU), or lower rollout.max_context"
LESS_CACHE = "lower engine.vllm.memory_share (cache_gib on a CPU), or end what else takes memory"
DO_WITHOUT = "set engine.sampler=auto to do without vLLM"
REMEDIES = {
    "KV cache is needed": MORE_CACHE,
    "memory for the cache blocks": MORE_CACHE,
    "Free memory on": LESS_CACHE,
    "Available memory on": LESS_CACHE,
    "max_model_len": "lower rollout.max_context",
}
"""What to do about words in vLLM's messages."""
NOTICE_S = 2.0
"""How long vLLM may take to notice that one of its processes died."""


class VllmSampler:
    """Writes replies with vLLM; the same weights, prompt and seed give the same reply.

    Made of a folder in Hugging Face format it has the weights of the folder; of a model, none
    until `load_weights`. `streams` as in `SlotSampler`. With `engine.vllm.tensor_parallel` above 1
    every part of the model has a process of its own, and takes its weights from files.
    """

    def __init__(
        self, source: Path | torch.nn.Module, config: Config, *, streams: bool | None = None
    ) -> None:
        device = pick_device(config.engine.device)
        self.is_cuda = device.type == "cuda"
        self.version = 0
        self.num_cached_tokens = 0
        """Prompt tokens so far whose keys and values were there already."""
        self._streams = self.is_cuda if streams is None else streams
        self._owners: dict[str, tuple[VllmStream, int]] = {}
        self._sessions: set[int] = set()
        """Of streams in lockstep, whose sessions may come back."""
        self._num_requests = 0
        self._vllm_params: Any = import_vllm().SamplingParams
        self._has_own_group = not torch.distributed.is_initialized()
        self._files: FileWriter | None = None
        with _model_folder(source) as folder:
            options = engine_options(config)
            if self.is_cuda and not self._has_own_group:
                # A rank of torchrun: vLLM takes the GPU of LOCAL_RANK.
                options["distributed_executor_backend"] = "external_launcher"
            if not isinstance(source, Path):
                options["load_format"] = "dummy"
            self._engine: Any = _make_engine(folder, options)
        if config.engine.vllm.tensor_parallel > 1:
            self._files = FileWriter(source, config)
            # From now on weights come from files, also where there were none at first.
            loads = {"load_config": {"load_format": "safetensors", "use_tqdm_on_load": False}}
            self._engine.collective_rpc("update_config", args=(loads,))
        self._max_context = self._engine.model_config.max_model_len
        if not self._has_own_group:
            _leave_group_alone(self._engine)

    def stream(self, params: SamplingParams) -> Stream:
        return VllmStream(self, params) if self._streams else LockstepStream(self, params)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order; prefixes stay cached."""
        check_requests(requests, params)
        self._sessions.update(request.session for request in requests)
        return write_all(VllmStream(self, params), requests)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Empty the cache once nobody uses it any more: a resumed run starts without one too."""
        self._sessions.difference_update(sessions)
        if not self._owners and not self._sessions:
            self._engine.reset_prefix_cache()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over the weights of the learner, by the names of the Hugging Face model.

        All of them, also an output layer that is tied to the input: on a CPU vLLM packs it apart.
        """
        if self._owners:
            raise MooredError("weights arrived while replies are under way; close the stream first")
        with torch.no_grad(), self._watched("does not take over the learner's weights"):
            if self._files is not None:
                with self._files.written(weights) as folder:
                    asked = {"weights_path": str(folder)}
                    self._engine.collective_rpc("reload_weights", kwargs=asked)
            elif self.is_cuda:
                # Copied parameter by parameter, to where recorded graphs read them.
                self._engine.apply_model(lambda model: model.load_weights(weights))
            else:
                # Linear layers are packed for the processor, so that they are made anew.
                given = {"weights_iterator": iter(weights)}
                self._engine.collective_rpc("reload_weights", kwargs=given)
        self._engine.reset_prefix_cache()
        self._sessions.clear()
        self.version = version

    def enter(self, stream: VllmStream, request: Request, params: SamplingParams) -> str:
        """Hand a request to vLLM; returns its name there."""
        longest = len(request.prompt.ids) + params.max_tokens
        if longest > self._max_context:
            raise MooredError(
                f"a prompt of {len(request.prompt.ids)} tokens and a reply of up to "
                f"{params.max_tokens} do not fit vLLM's context of {self._max_context}; raise "
                f"rollout.max_context"
            )
        asked = self._vllm_params(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            seed=request.seed,
            stop_token_ids=list(params.stop_ids),
            # Only what the request names ends a reply.
            ignore_eos=True,
            # 0 further tokens beside the one that was drawn.
            logprobs=0,
            detokenize=False,
        )
        name, self._num_requests = f"{self._num_requests}", self._num_requests + 1
        prompt = {"prompt_token_ids": request.prompt.ids.tolist()}
        self._engine.add_request(name, prompt, asked)
        self._owners[name] = stream, request.session
        return name

    def step(self) -> None:
        """Compute one step of all replies under way, and give finished ones to their streams."""
        with self._watched("stopped") if self._files else nullcontext():
            outputs = self._engine.step()
        for output in outputs:
            if not output.finished:
                continue
            stream, session = self._owners.pop(output.request_id)
            self.num_cached_tokens += output.num_cached_tokens or 0
            stream.take(session, _completion(output, self.version))

    def drop(self, names: Sequence[str]) -> None:
        """Stop writing these replies."""
        for name in names:
            del self._owners[name]
        if names:
            self._engine.abort_request(list(names))

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """One sentence for an error of vLLM; `WorkerLost` where a part of the model is gone."""
        try:
            with _explained(what):
                yield
        except MooredError as error:
            if self._files is None or not _has_lost_part(self._engine):
                raise
            raise WorkerLost(
                f"vLLM lost a process of engine.vllm.tensor_parallel ({error.__cause__}); resume "
                f"the run"
            ) from error

    def close(self) -> None:
        """End vLLM and give its memory back; in a rank, that happens with the process."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        if self._has_own_group:
            engine.engine_core.shutdown()
            importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory()


def vllm_sampler(
    model: torch.nn.Module,
    config: Config,
    *,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    shares: bool = False,
) -> VllmSampler | ServerSampler:
    """A copy of the weights that a model has now, or of those given."""
    kind = VllmSampler if config.engine.vllm.server is None else ServerSampler
    sampler = kind(model, config)
    try:
        sampler.load_weights(plain_weights(model) if weights is None else weights, 0)
    except BaseException:
        sampler.close()
        raise
    return sampler


class VllmStream(Stream):
    """Replies under way in a `VllmSampler`; several streams may write at a time."""

    is_lockstep = False

    def __init__(self, sampler: VllmSampler, params: SamplingParams) -> None:
        check_params(params)
        self._sampler = sampler
        self._params = params
        self._under_way: dict[int, str] = {}
        self._finished: list[tuple[int, Completion]] = []

    def submit(self, request: Request) -> None:
        check_text_prompt(request.prompt)
        if request.session in self._under_way:
            raise MooredError(f"session {request.session} already has a request under way")
        name = self._sampler.enter(self, request, self._params)
        self._under_way[request.session] = name

    def take(self, session: int, completion: Completion) -> None:
        """Keep a finished reply for the next poll."""
        del self._under_way[session]
        self._finished.append((session, completion))

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        start = time.monotonic()
        while self._under_way and not self._finished:
            self._sampler.step()
            if wait_s is not None and time.monotonic() - start >= wait_s:
                break
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self._sampler.drop(list(self._under_way.values()))
        self._under_way.clear()
        self._finished.clear()
        self._sampler.end_sessions(())


def _completion(output: Any, version: int) -> Completion:
    """What a Sampler returns, of what vLLM returns."""
    (reply,) = output.outputs
    ids = np.array(reply.token_ids, dtype=np.int64)
    if reply.finish_reason not in ("stop", "length") or reply.logprobs is None:
        return Completion(
            token_ids=np.zeros(0, dtype=np.int64),
            logprobs=np.zeros(0, dtype=np.float32),
            finish_reason=FinishReason.ERROR,
            policy_version=version,
            error=f"vLLM ended the reply with {reply.finish_reason!r}",
        )
    pairs = zip(reply.token_ids, reply.logprobs, strict=True)
    logprobs = np.array([found[token].logprob for token, found in pairs], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise MooredError(
            "the model's log-probabilities are not finite: its weights are damaged; go back to "
            "an earlier checkpoint"
        )
    is_stop = reply.finish_reason == "stop"
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
        policy_version=version,
    )


@contextmanager
def _model_folder(source: Path | torch.nn.Module) -> Iterator[Path]:
    """The folder itself, or for the block one with the configuration of a model alone."""
    if isinstance(source, Path):
        yield source
        return
    config = described(source)
    with tempfile.TemporaryDirectory(prefix="moored-vllm-") as folder:
        config.save_pretrained(folder)
        yield Path(folder)


def _make_engine(folder: Path, options: dict[str, Any]) -> Any:
    make = import_vllm().LLM
    alone = nullcontext() if "tensor_parallel_size" not in options else deaf_to_interrupts()
    with alone, warnings.catch_warnings(), _explained("does not take this model"):
        warnings.simplefilter("ignore")
        return make(model=str(folder), **options).llm_engine


def _has_lost_part(engine: Any) -> bool:
    """Did a process end that has a part of the model? vLLM notices within a moment."""
    executor = engine.engine_core.engine_core.model_executor
    deadline_s = time.monotonic() + NOTICE_S
    while not executor.is_failed and time.monotonic() < deadline_s:
        time.sleep(NOTICE_S / 100)
    return executor.is_failed


def _leave_group_alone(engine: Any) -> None:
    """Have vLLM not end the group of all ranks when this process ends: it is gone by then."""
    at_exit = getattr(engine.engine_core, "_finalizer", None)
    if at_exit is not None:
        at_exit.detach()


@contextmanager
def _explained(what: str, otherwise: str = DO_WITHOUT) -> Iterator[None]:
    """One sentence for what vLLM raises about a model, its length or the memory."""
    try:
        yield
    except MooredError:
        raise
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("Value error, ")), " ".join(lines))
        why = why.removeprefix("Value error, ").split(". ")[0].rstrip(".")
        remedy = next((r for words, r in REMEDIES.items() if words in why), "")
        raise MooredError(f"vLLM {what}: {why}; {remedy or otherwise}") from error
