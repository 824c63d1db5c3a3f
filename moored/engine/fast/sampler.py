"""Sampler for Llama-shaped models: every episode owns a slot of one cache, from turn to turn.

A turn computes only its new tokens, without padding, and writes their keys and values where they
stay. A first prompt that many episodes share is computed and kept once, in a slot of its own. On a
GPU one decoding step is one CUDA graph, captured once for each number of rows: the host neither
launches kernels nor waits for tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from moored.engine.base import LockstepStream, Request, SamplingParams, check_requests
from moored.engine.fast.buckets import bucket
from moored.engine.fast.capture import capture, run_aside
from moored.engine.fast.decoder import Decoder
from moored.engine.fast.rows import MAX_STOPS, State, rows_of
from moored.engine.fast.slots import MIN_SHARERS, Job, Slots
from moored.errors import MooredError
from moored.types import Completion, FinishReason

PREFILL_TOKENS = {"cuda": 32768, "cpu": 4096}
"""Bound on the tokens of one forward pass."""
STEPS_BETWEEN_CHECKS = {"cuda": 16, "cpu": 4}
"""Tokens between looks at which rows still run: on a GPU each look waits for the device."""
MIN_ROWS = 8
"""Rows of the smallest CUDA graph."""
CACHE_SHARE = 0.6
"""Share of the free GPU memory that the cache may take."""


class SlotSampler:
    """Writes replies; the same weights, prompt and seed give the same reply."""

    _cache: torch.Tensor
    _state: State

    def __init__(self, model: Any, *, dtype: torch.dtype, max_context: int) -> None:
        self.decoder = Decoder(model, dtype)
        self.device = self.decoder.device
        self.version = 0
        self._kind = self.device.type if self.device.type in PREFILL_TOKENS else "cpu"
        self._capacity = max_context
        self._slots = Slots(0)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        with torch.no_grad():
            self.decoder.load(weights)
        self._slots.end(list(self._slots.sessions))
        self.version = version

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self._slots.end(sessions)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        check_requests(requests, params)
        if len(params.stop_ids) > MAX_STOPS:
            raise MooredError(f"at most {MAX_STOPS} stop tokens, got {len(params.stop_ids)}")
        if not requests:
            return []
        longest = max(len(request.prompt.ids) for request in requests) + params.max_tokens
        self._reserve(len(requests), longest)
        at_a_time = self._slots.num_rows
        completions: list[Completion] = []
        for start in range(0, len(requests), at_a_time):
            completions += self._generate(requests[start : start + at_a_time], params)
        return completions

    def _reserve(self, num_rows: int, longest: int) -> None:
        """Have a slot for every row, or as many as fit; then rows take turns."""
        have = self._slots.num_rows
        if num_rows <= have and longest <= self._capacity:
            return
        self._capacity = max(self._capacity, longest)
        wanted = max(bucket(num_rows, MIN_ROWS), have)
        if have:
            most = self._max_rows(self._cache.nbytes)
            if longest <= self._cache.shape[4] and min(wanted, most) <= have:
                return
            del self._cache, self._state
            self._graphs.clear()
            self._pool = None
        self._slots = Slots(min(wanted, self._max_rows()))
        self._cache = self.decoder.new_cache(self._slots.idle + 1, self._capacity)
        self._state = State(
            self._slots.num_rows, self._capacity, self._slots.idle, self.decoder.device
        )

    def _max_rows(self, reclaimed: int = 0) -> int:
        """Rows whose slots fit into memory; on a CPU, which takes pages when used, any number."""
        if self._kind == "cpu":
            return 1 << 30
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] + reclaimed
        slots = int(CACHE_SHARE * free) // self.decoder.slot_bytes(self._capacity)
        return max(1, slots * MIN_SHARERS // (MIN_SHARERS + 1) - 1)

    def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        jobs, owners = self._slots.place(requests)
        sessions = [self._slots.sessions[request.session] for request in requests]
        if self._kind == "cpu":
            # The rows are then one slice of the cache, which is read without copying.
            self._shift(*self._slots.line_up(sessions))
        hidden = self._prefill(jobs)[torch.tensor(owners, device=self.device)]
        self._state.begin(requests, sessions, params)
        num_rows = len(requests)
        self._draw(hidden, num_rows)
        num_rows = self._padded(num_rows)
        for t in range(1, params.max_tokens):
            if t % STEPS_BETWEEN_CHECKS[self._kind] == 0:
                num_rows = self._compact(num_rows)
                if num_rows == 0:
                    break
            self._step(num_rows)
        return self._collect(requests, params)

    def _shift(self, source: dict[int, int], held: int) -> None:
        """Fill the first `held` cells of slots from those of others, all at once."""
        if not source:
            return
        into, given = torch.tensor(list(source)), torch.tensor(list(source.values()))
        for part in self._cache.flatten(0, 1):
            part[into, :, :held] = part[given, :, :held]

    def _prefill(self, jobs: Sequence[Job]) -> torch.Tensor:
        """(jobs, width) output at the last token of each."""
        # On a CPU the rows of a pass are padded to the longest: rows of similar length together.
        is_padded = self._kind == "cpu"
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].ids) if is_padded else 0)
        parts = []
        for part in _chunks([jobs[i] for i in order], PREFILL_TOKENS[self._kind], is_padded):
            rows, ids, last = rows_of(part, self.device)
            parts.append(self.decoder.forward(self._cache, ids, rows)[last])
        hidden = torch.cat(parts)
        back = torch.empty_like(hidden)
        back[torch.tensor(order, device=self.device)] = hidden
        return back

    def _draw(self, hidden: torch.Tensor, num_rows: int) -> None:
        state = self._state
        self.decoder.ops.draw(
            self.decoder.logits(hidden),
            state.inverse_temperature,
            state.stops,
            state.drawn(num_rows),
            (state.out_tokens, state.out_logps),
        )

    def _step(self, num_rows: int) -> None:
        """Run the last tokens of the first rows through the model and draw the next."""
        if self._kind == "cpu":
            self._decode(num_rows)
            return
        if num_rows not in self._graphs:
            self._graphs[num_rows] = self._capture(num_rows)
        self._graphs[num_rows].replay()

    def _decode(self, num_rows: int) -> None:
        rows, tokens = self._state.one_token_each(num_rows), self._state.tokens[:num_rows]
        self._draw(self.decoder.forward(self._cache, tokens, rows), num_rows)

    def _capture(self, num_rows: int) -> torch.cuda.CUDAGraph:
        """Record a step. While it is tried out no row runs, so nothing is drawn."""
        running = self._state.running.clone()
        self._state.running.zero_()
        with torch.cuda.device(self.device):
            run_aside(lambda: self._decode(num_rows))
            graph, _ = capture(lambda: self._decode(num_rows), self._pool)
        self._pool = graph.pool()
        self._state.running.copy_(running)
        return graph

    def _padded(self, num_rows: int) -> int:
        """Rows of the graph that is used for so many."""
        if self._kind == "cpu":
            return num_rows
        return min(bucket(num_rows, MIN_ROWS), self._slots.num_rows)

    def _compact(self, num_rows: int) -> int:
        """Go on with the running rows alone once clearly fewer rows than now would do."""
        running = self._state.running[:num_rows].bool()
        alive = running.nonzero().squeeze(-1)
        if len(alive) == 0:
            return 0
        if 4 * self._padded(len(alive)) > 3 * num_rows:
            return num_rows
        if self._kind == "cpu":
            self._close_ranks(running, len(alive))
        else:
            self._state.order(alive, len(alive))
        return self._padded(len(alive))

    def _close_ranks(self, running: torch.Tensor, num_live: int) -> None:
        """Exchange running rows behind `num_live` with stopped ones before it, slots included."""
        holes = (~running[:num_live]).nonzero().squeeze(-1)
        movers = running[num_live:].nonzero().squeeze(-1) + num_live
        order = torch.arange(len(running))
        order[holes], order[movers] = movers, holes
        pairs = list(zip(holes.tolist(), movers.tolist(), strict=True))
        held = int(self._state.cells[: len(running)].max()) + 1
        self._shift({**dict(pairs), **{mover: hole for hole, mover in pairs}}, held)
        self._slots.swap(holes.tolist(), movers.tolist())
        self._state.order(order, num_live)
        self._state.slots[:num_live] = self._state.every_row[:num_live]

    def _collect(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        def fetched(tensor: torch.Tensor) -> np.ndarray:
            return tensor[: len(requests), : params.max_tokens].cpu().numpy()

        tokens = fetched(self._state.out_tokens).astype(np.int64)
        logps = fetched(self._state.out_logps).copy()
        is_stop = np.isin(tokens, np.array(params.stop_ids, dtype=np.int64))
        lengths = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, params.max_tokens)
        is_reply = np.arange(params.max_tokens) < lengths[:, None]
        if not np.isfinite(logps[is_reply]).all():
            raise MooredError(
                "the model's log-probabilities are not finite: its weights are damaged; go back to "
                "an earlier checkpoint"
            )
        completions = []
        for row, (request, length) in enumerate(zip(requests, lengths.tolist(), strict=True)):
            ids = tokens[row, :length]
            # The last token was drawn, but not yet run through the model.
            seen = np.concatenate([request.prompt.ids, ids[:-1]])
            self._slots.sessions[request.session].ids = seen
            completions.append(
                Completion(
                    token_ids=ids,
                    logprobs=logps[row, :length],
                    finish_reason=FinishReason.STOP
                    if is_stop[row, length - 1]
                    else FinishReason.LENGTH,
                    policy_version=self.version,
                )
            )
        return completions


def _chunks(jobs: Sequence[Job], max_tokens: int, is_padded: bool) -> Iterator[Sequence[Job]]:
    """Jobs in order, at most `max_tokens` at a time, perhaps with padding (one job at least)."""
    start, used = 0, 0
    for stop, job in enumerate(jobs):
        size = len(job.ids)
        used = size * (stop - start + 1) if is_padded else used + size
        if stop > start and used > max_tokens:
            yield jobs[start:stop]
            start, used = stop, size
    yield jobs[start:]
