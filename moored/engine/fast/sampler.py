"""Sampler for Llama-shaped models: every episode owns a slot of one cache, from turn to turn.

A turn computes only its new tokens and writes their keys and values where they stay. A first prompt
that many episodes share is computed and kept once, in a slot of its own. On a GPU replies come as a
stream: rows enter and leave while others are written (`stream`), and decoding steps and the entry
of rows are CUDA graphs, so that the host neither launches kernels nor waits for tokens. On a CPU
all replies of a batch are written in lockstep (`lockstep`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from moored.cores import main_memory_bytes
from moored.engine.base import (
    LockstepStream,
    Request,
    SamplingParams,
    Stream,
    check_requests,
    write_all,
)
from moored.engine.fast.buckets import tile_bucket
from moored.engine.fast.capture import Fetch, HostBuffers, capture, run_aside
from moored.engine.fast.decoder import Decoder
from moored.engine.fast.fixed_memory import FixedMemory, has_fixed_memory
from moored.engine.fast.lockstep import write_batch
from moored.engine.fast.rows import (
    MAX_RECORDED_TOKENS,
    PassShape,
    State,
    check_fast_params,
    entries_size,
    make_completions,
    padded_shape,
    unpack_entries,
    unpack_rows,
)
from moored.engine.fast.slots import MIN_SHARERS, Session, Slots
from moored.engine.fast.stream import SlotStream
from moored.engine.passes import says_out_of_memory
from moored.errors import MooredError
from moored.types import Completion

MIN_ROWS = 8
"""Rows of the smallest CUDA graph."""
CACHE_SHARE = 0.6
"""Share of the free GPU memory that the cache may take."""
SPARE = 1.1
"""How many times the rows of that share a lent cache may have when it comes back: what was recorded
takes memory too, and must not be recorded again for it."""
STEPS_PER_GRAPH = 8
"""Decoding steps that the host launches at once."""


class SlotSampler:
    """Writes replies; the same weights, prompt and seed give the same reply.

    `streams` says whether `stream` overlaps replies or writes them in lockstep: by default it
    overlaps on a GPU, where that is faster, and not on a CPU. Which rows are computed together
    then depends on the time environments take, so replies repeat up to rounding only. With `shares`
    it writes with the model's own weights, as in `Decoder`; with `device` it has none until
    `load_weights`. With `lends` others use the memory of the cache after a `release`, and what was
    recorded stays.
    """

    cache: torch.Tensor
    state: State

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        max_context: int,
        streams: bool | None = None,
        shares: bool = False,
        lends: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.decoder = Decoder(model, dtype, shares=shares, device=device)
        self.device = self.decoder.device
        self.is_cuda = self.device.type == "cuda"
        self.version = 0
        self.slots = Slots(0)
        self._streams = self.is_cuda if streams is None else streams
        self._owner: SlotStream | None = None
        self._capacity = max_context
        self._is_full = False
        self._is_damaged = False
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._entry_graphs: dict[PassShape, torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None
        self.lends = lends and has_fixed_memory(self.device)
        self._memory: FixedMemory | None = None
        self._held_beside = 0
        """What others held when it was last seen that the cache leaves them enough."""
        self.uploads = HostBuffers(self.device, num_buffers=4)
        # A stream reads what a chunk of steps has written while the next chunk is under way.
        self._fetched = HostBuffers(self.device, num_buffers=2)

    def stream(self, params: SamplingParams) -> Stream:
        return SlotStream(self, params) if self._streams else LockstepStream(self, params)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._owner is not None and self._owner.is_writing:
            raise MooredError("weights arrived while replies are under way; close the stream first")
        if self._is_damaged:
            self.release()
            self._is_damaged = False
        with torch.no_grad():
            self.decoder.load(weights)
        self.slots.end(list(self.slots.sessions))
        self.version = version

    def end_sessions(self, sessions: Sequence[int], waiting: Collection[Request] = ()) -> None:
        """Free their slots; prompts that `waiting` requests have stay."""
        self.slots.end(sessions, waiting)

    @says_out_of_memory("sampling")
    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order; sessions are kept."""
        check_requests(requests, params)
        check_fast_params(params)
        if not self.is_cuda:
            return write_batch(self, requests, params)
        stream = SlotStream(self, params, come_back=False)
        try:
            return write_all(stream, requests)
        finally:
            stream.close()

    def claim(self, stream: SlotStream | None, params: SamplingParams) -> None:
        """Let a stream use the lanes; there is one set of them, with one set of parameters."""
        if self._owner is stream is not None:
            return
        if self._owner is not None and self._owner.is_writing:
            raise MooredError("another stream has replies under way; poll or close it first")
        self._owner, self._is_full = stream, False
        if self.slots.num_rows:
            self.state.set_params(params)

    def let_go(self, stream: SlotStream) -> None:
        """A stream that was closed: neither keeps the other, and the memory of both, alive."""
        if self._owner is stream:
            self._owner = None

    def reserve(self, num_rows: int, longest: int, params: SamplingParams) -> bool:
        """Have a slot for every row, or as many as fit; True when all that was kept is lost."""
        self._take_back()
        have = self.slots.num_rows
        if longest <= self._capacity and have and (num_rows <= have or self._is_full):
            return False
        capacity = max(self._capacity, longest)
        wanted = max(tile_bucket(num_rows, MIN_ROWS), have)
        if have:
            most = self._max_rows(capacity, self.cache.nbytes)
            self._is_full = most < wanted
            if longest <= self._capacity and min(wanted, most) <= have:
                return False
            self._free()
        most = self._max_rows(capacity)
        self._is_full = most < wanted
        slots = Slots(min(wanted, most))
        state = State(slots.num_rows, capacity, slots.idle, self.device)
        state.set_params(params)
        largest = padded_shape(MAX_RECORDED_TOKENS - 1, slots.num_rows, 1)
        size = entries_size(largest.rows) + largest.size
        inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        # The cache last, and all of it or nothing: a try that fails leaves no memory behind in
        # which the next one would have no room.
        self.cache = self._new_cache(slots.idle + 1, capacity)
        self.state, self._inputs, self._capacity, self.slots = state, inputs, capacity, slots
        return True

    def _new_cache(self, num_slots: int, capacity: int) -> torch.Tensor:
        if not self.lends:
            return self.decoder.new_cache(num_slots, capacity)
        self.decoder.set_capacity(capacity)
        shape = self.decoder.cache_shape(num_slots, capacity)
        self._memory = FixedMemory(shape, self.decoder.dtype, self.device)
        self._held_beside = self._count_held()
        return self._memory.tensor

    @property
    def uncounted_bytes(self) -> int:
        """Memory of the GPU that it has now, and that torch does not count."""
        return 0 if self._memory is None else self._memory.num_bytes

    def release(self) -> None:
        """Give memory back: that of the cache alone with `lends`, else of all that was recorded."""
        if self._owner is not None and self._owner.is_writing:
            raise MooredError("replies are under way; poll or close their stream first")
        if not self.slots.num_rows:
            return
        self._is_full = False
        if self._memory is not None:
            self.slots = Slots(self.slots.num_rows)
            self._memory.give_back()
            return
        self._free()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def _take_back(self) -> None:
        """After a `release` with `lends`: use the memory of the cache again, unless it is too much.

        The first cache is made before the first update, which makes the moments of the optimiser.
        """
        if self._memory is None or self._memory.is_there:
            return
        held = self._count_held()
        if held > self._held_beside:
            self._held_beside = held
            if self.slots.num_rows > SPARE * self._max_rows(self._capacity):
                self._free()
                return
        try:
            self._memory.take()
        except torch.OutOfMemoryError:
            self._free()

    def _count_held(self) -> int:
        """Bytes of torch's on the GPU; the cache is none of them."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    def _free(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)  # what is under way uses what goes away
        self.slots = Slots(0)
        del self.cache, self.state
        self._graphs.clear()
        self._entry_graphs.clear()
        self._pool = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _max_rows(self, capacity: int, reclaimed: int = 0) -> int:
        """Rows whose slots fit into memory: on a CPU all of it, since pages are taken when used."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(self.device)[0] + reclaimed
        else:
            free = main_memory_bytes()
        slots = int(CACHE_SHARE * free) // self.decoder.slot_bytes(capacity)
        return max(1, slots * MIN_SHARERS // (MIN_SHARERS + 1) - 1)

    def padded(self, num_rows: int) -> int:
        """Rows padded up to the size of a graph."""
        return min(tile_bucket(num_rows, MIN_ROWS), self.slots.num_rows)

    def draw(self, hidden: torch.Tensor, drawn: tuple[torch.Tensor, ...]) -> None:
        """Draw the next token of every row that runs."""
        state = self.state
        self.decoder.ops.draw(
            self.decoder.logits(hidden),
            state.inverse_temperature,
            state.stops,
            state.max_tokens,
            drawn,
            (state.out_tokens, state.out_logps),
        )

    def decode(self, num_rows: int) -> None:
        """Run the last tokens of the first rows through the model and draw the next."""
        rows, tokens = self.state.one_token_each(num_rows), self.state.tokens[:num_rows]
        self.draw(self.decoder.forward(self.cache, tokens, rows), self.state.drawn(num_rows))

    def advance(self, num_rows: int, num_steps: int) -> None:
        """Run decoding steps of the first rows; lanes of rows that stopped are idle afterwards.

        On a GPU as graphs, of several steps or of one, recorded once for each number of rows.
        """
        if not self.is_cuda or not num_steps:
            self._decode_and_retire(num_rows, num_steps)
            return
        several, single = divmod(num_steps, STEPS_PER_GRAPH)
        for size in (STEPS_PER_GRAPH,) * several + (1,) * single:
            if (num_rows, size) not in self._graphs:
                self._graphs[num_rows, size] = self._capture(num_rows, size)
            self._graphs[num_rows, size].replay()

    def _decode_and_retire(self, num_rows: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.decode(num_rows)
        self.state.retire()

    def _capture(self, num_rows: int, num_steps: int) -> torch.cuda.CUDAGraph:
        """Record steps. While one is tried out no row runs, so nothing is drawn."""
        columns = self.state.columns.clone()
        self.state.running.zero_()
        with torch.cuda.device(self.device):
            run_aside(lambda: self._decode_and_retire(num_rows, 1))
            graph, _ = capture(lambda: self._decode_and_retire(num_rows, num_steps), self._pool)
        self._pool = graph.pool()
        self.state.columns.copy_(columns)
        return graph

    def enter(self, packed: np.ndarray, shape: PassShape) -> None:
        """Compute prompts, draw their rows' first tokens, put the rows into lanes.

        `packed` is what `pack_entries` and `pack_jobs` made. A shape is recorded when it is seen
        for the second time: by then its kernels are compiled.
        """
        if not self.is_cuda or shape.tokens > MAX_RECORDED_TOKENS:
            self._enter(self.uploads.send(packed), shape)
            return
        inputs = self.uploads.send(packed, self._inputs[: len(packed)])
        if shape not in self._entry_graphs:
            self._entry_graphs[shape] = None
            self._enter(inputs, shape)
            return
        graph = self._entry_graphs[shape]
        if graph is None:
            with torch.cuda.device(self.device):
                graph, _ = capture(lambda: self._enter(inputs, shape), self._pool)
            self._pool = graph.pool()
            self._entry_graphs[shape] = graph
        graph.replay()

    def _enter(self, packed: torch.Tensor, shape: PassShape) -> None:
        entries = unpack_entries(packed, shape.rows)
        rows, ids = unpack_rows(packed[entries_size(shape.rows) :], shape)
        self.draw(self.decoder.forward(self.cache, ids, rows, entries.lasts), entries.drawn)
        self.state.enter(entries)

    def complete(
        self,
        tokens: np.ndarray,
        logps: np.ndarray,
        lengths: Sequence[int],
        rows: Sequence[tuple[Request, Session]],
        params: SamplingParams,
    ) -> list[Completion]:
        """What `make_completions` makes of replies; a cache that is not finite goes with weights.

        Even cells that nobody sees would spoil later replies: 0 · nan is nan.
        """
        try:
            return make_completions(tokens, logps, lengths, rows, params, self.version)
        except MooredError:
            self._is_damaged = True
            raise

    def fetch(self, num_rows: int, longest: int) -> Fetch:
        """Enqueue a copy of `State.replies`; it holds until the second fetch after this one."""
        return Fetch(self.state.replies(num_rows, longest), self._fetched)
