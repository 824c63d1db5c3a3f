"""Sampler in this process, on Hugging Face causal LMs.

All live episodes are written together, token by token. Keys and values stay across turns, so a turn
computes only its new tokens; the first prompt of a group is computed once. R rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from moored.engine.base import LockstepStream, Request, SamplingParams, check_requests
from moored.engine.fast.plain_ops import uniforms
from moored.engine.local.kv import RowCache, gather
from moored.engine.passes import says_out_of_memory, scaled_logits, trunk_of
from moored.errors import MooredError
from moored.types import Completion, FinishReason

STEPS_BETWEEN_CHECKS = 8
"""Tokens between checks whether rows are done: on a GPU each check waits for the device."""
MIN_ROWS_TO_COMPACT = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Session:
    """Where an episode's keys and values are, and for which tokens."""

    cache: RowCache
    row: int
    ids: np.ndarray


@dataclass(slots=True, eq=False)
class _Live:
    """The rows that are being written."""

    cache: RowCache
    hidden: torch.Tensor
    """(R, width) output at each row's last token."""
    lengths: torch.Tensor
    """(R,) tokens in the cache."""
    requests: torch.Tensor
    """(R,) which request each row answers."""


class LocalSampler:
    """Writes replies with `model`; the same weights, prompt and seed give the same reply."""

    def __init__(self, model: nn.Module, *, shares_weights: bool = True) -> None:
        self.model = model
        self.version = 0
        self._shares_weights = shares_weights
        self._sessions: dict[int, _Session] = {}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if not self._shares_weights:
            own = self.model.state_dict()
            for name, tensor in weights:
                own[name].copy_(tensor)
        self._sessions.clear()
        self.version = version

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self._sessions.pop(session, None)

    @says_out_of_memory("sampling")
    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        check_requests(requests, params)
        was_training = self.model.training
        self.model.eval()
        known = [i for i, request in enumerate(requests) if self._is_known(request)]
        fresh = [i for i in range(len(requests)) if i not in set(known)]
        done: dict[int, Completion] = {}
        for part, prefill in ((fresh, self._prefill_fresh), (known, self._prefill_known)):
            if part:
                chosen = [requests[i] for i in part]
                replies = self._write(chosen, prefill(chosen, params.max_tokens), params)
                done.update(zip(part, replies, strict=True))
        self.model.train(was_training)
        return [done[i] for i in range(len(requests))]

    def _is_known(self, request: Request) -> bool:
        session = self._sessions.get(request.session)
        if session is None or len(session.ids) >= len(request.prompt.ids):
            return False
        return np.array_equal(request.prompt.ids[: len(session.ids)], session.ids)

    def _prefill_fresh(self, requests: Sequence[Request], max_tokens: int) -> _Live:
        """Compute each distinct prompt once, then hand it to all its rows."""
        index: dict[bytes, int] = {}
        owner = [index.setdefault(r.prompt.key, len(index)) for r in requests]
        firsts = [owner.index(i) for i in range(len(index))]
        prompts = [requests[i].prompt.ids for i in firsts]
        longest = max(map(len, prompts))
        cache = RowCache(len(prompts), longest)
        start = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        hidden, lengths = self._feed(cache, prompts, start)
        rows = torch.tensor(owner, device=self.device)
        return _Live(
            cache.select(rows, longest + max_tokens),
            hidden[rows],
            lengths[rows],
            torch.arange(len(requests), device=self.device),
        )

    def _prefill_known(self, requests: Sequence[Request], max_tokens: int) -> _Live:
        """Gather the rows into one cache and compute their new tokens."""
        sessions = [self._sessions[r.session] for r in requests]
        order = sorted(range(len(requests)), key=lambda i: id(sessions[i].cache))
        parts: list[tuple[RowCache, torch.Tensor]] = []
        for i in order:
            row = torch.tensor([sessions[i].row], device=self.device)
            if parts and parts[-1][0] is sessions[i].cache:
                parts[-1] = (parts[-1][0], torch.cat([parts[-1][1], row]))
            else:
                parts.append((sessions[i].cache, row))
        longest = max(len(r.prompt.ids) for r in requests)
        pending = [requests[i].prompt.ids[len(sessions[i].ids) :] for i in order]
        # Padding of shorter pending stretches is written behind the row and overwritten later.
        width = max(map(len, pending))
        cache = gather(parts, longest + max(max_tokens, width))
        start = torch.tensor([len(sessions[i].ids) for i in order], device=self.device)
        hidden, lengths = self._feed(cache, pending, start)
        return _Live(cache, hidden, lengths, torch.tensor(order, device=self.device))

    def _feed(
        self, cache: RowCache, tokens: Sequence[np.ndarray], start: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run new tokens of all rows through the model; outputs at, and lengths after, the last."""
        counts = torch.tensor([len(ids) for ids in tokens], device=self.device)
        width = int(counts.max())
        padded = np.zeros((len(tokens), width), dtype=np.int64)
        for row, ids in enumerate(tokens):
            padded[row, : len(ids)] = ids
        positions = start[:, None] + torch.arange(width, device=self.device)
        hidden = self._forward(cache, torch.from_numpy(padded).to(self.device), positions)
        last = hidden[torch.arange(len(tokens), device=self.device), counts - 1]
        return last, start + counts

    def _forward(self, cache: RowCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(R, T, width) outputs for tokens at given positions. The seam for graph capture."""
        visible = min(int(positions.max()) + 1, cache.capacity)
        cache.place(positions.clamp(max=cache.capacity - 1), visible)
        trunk = trunk_of(self.model)
        dtype = next(trunk.parameters()).dtype
        columns = torch.arange(visible, device=ids.device)
        hidden_from = columns[None, None, :] > positions[:, :, None]
        mask = torch.zeros(hidden_from.shape, dtype=dtype, device=ids.device)
        mask.masked_fill_(hidden_from, torch.finfo(dtype).min)
        return trunk(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _write(
        self, requests: Sequence[Request], live: _Live, params: SamplingParams
    ) -> list[Completion]:
        """Draw tokens until every row has stopped."""
        num_rows, device = len(requests), self.device
        seeds = torch.tensor([request.seed for request in requests], device=device)
        tokens = torch.zeros((num_rows, params.max_tokens), dtype=torch.long, device=device)
        logps = torch.zeros((num_rows, params.max_tokens), device=device)
        stops = torch.tensor(params.stop_ids, dtype=torch.long, device=device)
        running = torch.ones(num_rows, dtype=torch.bool, device=device)
        between = 1 if device.type == "cpu" else STEPS_BETWEEN_CHECKS
        for t in range(params.max_tokens):
            uniform = uniforms(seeds[live.requests], torch.tensor(t, device=device))
            drawn, logp = self._draw(live.hidden, uniform, params.temperature)
            tokens[live.requests, t] = drawn
            logps[live.requests, t] = logp
            running[live.requests] &= ~torch.isin(drawn, stops)
            if t + 1 == params.max_tokens:
                break
            if (t + 1) % between == 0:
                live, drawn = self._compact(requests, live, drawn, running)
                if len(live.requests) == 0:
                    break
            live.hidden = self._forward(live.cache, drawn[:, None], live.lengths[:, None])[:, 0]
            live.lengths = live.lengths + 1
        return self._collect(requests, live, tokens, logps, params)

    def _draw(
        self, hidden: torch.Tensor, uniform: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row by inverting the distribution function at the row's own number."""
        head = cast(nn.Module, self.model.get_output_embeddings())  # pyright: ignore[reportCallIssue]
        logp = torch.log_softmax(scaled_logits(self.model, head, hidden, temperature), dim=-1)
        if temperature == 0.0:
            drawn = logp.argmax(dim=-1)
        else:
            mass = logp.exp().cumsum(dim=-1)
            below = mass < uniform[:, None] * mass[:, -1:]
            drawn = below.sum(dim=-1).clamp(max=logp.shape[-1] - 1)
        return drawn, logp.gather(-1, drawn[:, None]).squeeze(-1)

    def _compact(
        self, requests: Sequence[Request], live: _Live, drawn: torch.Tensor, running: torch.Tensor
    ) -> tuple[_Live, torch.Tensor]:
        """Go on with the running rows alone once at most half of the rows still run."""
        alive = running[live.requests].nonzero().squeeze(-1)
        if len(alive) == 0:
            self._park(requests, live)
            return _Live(live.cache, live.hidden[:0], live.lengths[:0], live.requests[:0]), drawn
        if 2 * len(alive) > len(live.requests) or len(live.requests) < MIN_ROWS_TO_COMPACT:
            return live, drawn
        self._park(requests, live)
        smaller = live.cache.select(alive, live.cache.capacity)
        rest = _Live(smaller, live.hidden[alive], live.lengths[alive], live.requests[alive])
        return rest, drawn[alive]

    def _park(self, requests: Sequence[Request], live: _Live) -> None:
        """Remember where each row's keys and values are; rows that go on are parked again later."""
        for row, request in enumerate(live.requests.tolist()):
            self._sessions[requests[request].session] = _Session(live.cache, row, np.zeros(0))

    def _collect(
        self,
        requests: Sequence[Request],
        live: _Live,
        tokens: torch.Tensor,
        logps: torch.Tensor,
        params: SamplingParams,
    ) -> list[Completion]:
        self._park(requests, live)
        completions = []
        all_tokens, all_logps = tokens.cpu().numpy(), logps.cpu().numpy()
        if not np.isfinite(all_logps).all():
            raise MooredError(
                "the model's log-probabilities are not finite: its weights are damaged; go back to "
                "an earlier checkpoint"
            )
        is_stop = np.isin(all_tokens, params.stop_ids)
        for row, request in enumerate(requests):
            stopped = bool(is_stop[row].any())
            length = int(is_stop[row].argmax()) + 1 if stopped else params.max_tokens
            ids = all_tokens[row, :length].copy()
            # The last token was drawn, but not yet run through the model.
            parked = self._sessions[request.session]
            seen = np.concatenate([request.prompt.ids, ids[:-1]])
            self._sessions[request.session] = _Session(parked.cache, parked.row, seen)
            completions.append(
                Completion(
                    token_ids=ids,
                    logprobs=all_logps[row, :length].copy(),
                    finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    policy_version=self.version,
                )
            )
        return completions
