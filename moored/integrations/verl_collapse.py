"""Collapse metrics on verl's `DataProto`, and the spans of replies that agent loops record.

An agent loop knows where its replies and their reasonings lie: `reply_spans` goes into
`AgentLoopOutput.extra_fields`, and `batch_groups` finds it in the batch. Batches without spans are
read by loss mask and tags. `score_with` makes a score function of verl's own log-prob computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np

from moored.diagnostics.pairs import ScoreFn
from moored.errors import MooredError
from moored.integrations.completions import (
    Decode,
    TokenIds,
    group_episodes,
    make_turn,
    reasoning_after,
)
from moored.integrations.verl import DataProto
from moored.reply import THINK_TAGS, Tags
from moored.types import Group, Prompt, ScoreRequest, Turn

SPANS_KEY = "moored_spans"


class ReplySpans(TypedDict):
    """Token ranges [start, stop) inside the response of one row.

    A dict, because verl puts the fields of all rows into one array, which lists would break.
    """

    turns: list[list[int]]
    """The replies, in order."""
    thinks: list[list[int] | None]
    """The reasoning of each reply, tags excluded; None where there is none."""


def reply_spans(
    prompt_ids: TokenIds,
    response_ids: TokenIds,
    response_mask: TokenIds,
    decode: Decode | None,
    tags: Tags | None = THINK_TAGS,
) -> dict[str, ReplySpans]:
    """Spans for `AgentLoopOutput.extra_fields`, from the ids and the mask that the loop returns.

    A reply is a run of sampled tokens. `decode` must keep special tokens; `tags=None` takes whole
    replies as reasoning.
    """
    ids = [int(token) for token in (*prompt_ids, *response_ids)]
    offset = len(prompt_ids)
    turns = _runs(response_mask)
    thinks: list[list[int] | None] = []
    for start, stop in turns:
        span = reasoning_after(
            ids[: offset + start], ids[offset + start : offset + stop], decode, tags
        )
        thinks.append(None if span is None else [start + span[0], start + span[1]])
    return {SPANS_KEY: {"turns": turns, "thinks": thinks}}


def read_spans(batch: DataProto) -> list[ReplySpans | None]:
    """The spans of every row, None for rows whose agent loop recorded none."""
    columns = batch.non_tensor_batch
    if SPANS_KEY in columns:
        return list(columns[SPANS_KEY])
    if "extra_fields" in columns:
        return [(fields or {}).get(SPANS_KEY) for fields in columns["extra_fields"]]
    return [None] * len(batch)


def batch_groups(
    batch: DataProto, decode: Decode | None = None, tags: Tags | None = THINK_TAGS
) -> list[Group]:
    """The groups of a batch, one for each distinct prompt, as `CollapseMonitor.measure` takes them.

    Give it the batch before any filter. `decode` is needed where rows have no spans. Rows of
    different `data_source` are different environments, and are measured apart.
    """
    tensors = batch.batch
    for name in ("prompts", "responses", "attention_mask"):
        if name not in tensors:
            raise MooredError(f"the batch has no {name}, so its tokens cannot be read")
    if any(batch.non_tensor_batch.get("multi_modal_inputs", ())):
        raise MooredError(
            "prompts of this batch hold images, which token ids do not distinguish; measure "
            "collapse on rows of text only"
        )
    prompts, responses = tensors["prompts"].cpu().numpy(), tensors["responses"].cpu().numpy()
    attention = tensors["attention_mask"].cpu().numpy().astype(bool)
    width = prompts.shape[1]
    written = tensors["response_mask"].cpu().numpy() if "response_mask" in tensors else None
    sources = batch.non_tensor_batch.get("data_source", ["verl"] * len(batch))
    episodes: dict[str, list[tuple[Prompt, tuple[Turn, ...]]]] = {}
    for row, spans in enumerate(read_spans(batch)):
        is_response = attention[row, width:]
        prompt = prompts[row][attention[row, :width]].astype(np.int64)
        response = responses[row][is_response].astype(np.int64)
        if spans is None:
            mask = np.ones(len(response)) if written is None else written[row][is_response]
            spans = reply_spans(prompt, response, mask, decode, tags)[SPANS_KEY]
        _check_spans(row, spans, len(response))
        members = episodes.setdefault(str(sources[row]), [])
        members.append((Prompt(prompt), _turns(prompt, response, spans)))
    groups: list[Group] = []
    for env, members in episodes.items():
        groups += group_episodes(env, members, first_id=len(groups))
    return groups


def score_with(
    log_probs: Callable[[Any], Any], *, divisor: int = 1, batch_size: int = 64
) -> ScoreFn:
    """A score function from verl's log-probs: `DataProto` in, (rows, response width) tensor out.

    Rows are sent `batch_size` at a time, a multiple of `divisor`, the number of data-parallel
    ranks; the last ones are repeated to fill up.
    """
    if batch_size % divisor:
        raise MooredError(
            f"batch_size must be a multiple of divisor, got {batch_size} rows for {divisor} ranks"
        )

    def score_one(prompt: Prompt, continuations: Sequence[np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for start in range(0, len(continuations), batch_size):
            part = [*continuations[start : start + batch_size]]
            filler = [part[-1]] * (-len(part) % divisor)
            scored = log_probs(_scoring_rows(prompt, part + filler)).float().cpu().numpy()
            found += [row[: len(ids)] for row, ids in zip(scored, part, strict=False)]
        return found

    def score(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [score_one(request.prompt, request.continuations) for request in requests]

    return score


def _scoring_rows(prompt: Prompt, continuations: Sequence[np.ndarray]) -> Any:
    """A real `DataProto`: one prompt, its continuations padded on the right."""
    import torch
    from verl import DataProto as VerlDataProto  # pyright: ignore[reportMissingImports]

    lengths = np.array([len(ids) for ids in continuations])
    mask = np.arange(lengths.max()) < lengths[:, None]
    responses = np.zeros(mask.shape, dtype=np.int64)
    responses[mask] = np.concatenate(continuations)
    prompts = np.tile(np.asarray(prompt.ids, dtype=np.int64), (len(responses), 1))
    attention = np.hstack([np.ones_like(prompts), mask])
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.hstack([prompts, responses]),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "response_mask": mask.astype(np.int64),
    }
    return VerlDataProto.from_dict({name: torch.from_numpy(x) for name, x in tensors.items()})


def _runs(mask: TokenIds) -> list[list[int]]:
    """[start, stop) of every run of ones."""
    steps = np.diff(np.asarray(mask) != 0, prepend=False, append=False)
    return np.flatnonzero(steps).reshape(-1, 2).tolist()


def _check_spans(row: int, spans: ReplySpans, length: int) -> None:
    last = max((stop for _, stop in spans["turns"]), default=0)
    if last > length:
        raise MooredError(
            f"the spans of row {row} reach token {last} of a response of {length} tokens; take "
            f"them of the ids that the agent loop returns, after it has cut them"
        )


def _turns(prompt: np.ndarray, response: np.ndarray, spans: ReplySpans) -> tuple[Turn, ...]:
    """The first prompt is all observation; later ones begin where the reply before them ends."""
    turns, observation_start = [], 0
    for (start, stop), think in zip(spans["turns"], spans["thinks"], strict=True):
        context = np.concatenate([prompt, response[:start]])
        span = None if think is None else (think[0] - start, think[1] - start)
        # Two replies with nothing between them leave nothing to exchange.
        is_new = observation_start < len(context)
        turns.append(
            make_turn(context, response[start:stop], span, observation_start if is_new else None)
        )
        observation_start = len(prompt) + stop
    return tuple(turns)
