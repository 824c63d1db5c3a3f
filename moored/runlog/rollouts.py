"""Rollouts on disk: the groups of a step as one Parquet file.

Each turn is a row, each group a row group. Every row can be read alone: it has the whole prompt and
the facts of its trajectory and group. (Whole prompts cost little: a later turn repeats the earlier
one, and zstd finds that.) An episode that ended before its first turn has one row whose `turn` is
null. Images are stored as PNG.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moored.errors import MooredError, RunLogError
from moored.runlog.log import replacing
from moored.runlog.parquet import need_pyarrow, parquet_columns, parquet_rows
from moored.types import (
    Content,
    Group,
    ImagePart,
    Prompt,
    Span,
    StopReason,
    TextPart,
    Trajectory,
    Turn,
    content_images,
    content_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 2
TOKEN_COLUMNS = {"prompt_ids": np.int64, "completion_ids": np.int64, "logprobs": np.float32}
"""The columns with one entry per token, and their types in memory."""
OPTIONAL_COLUMNS = {"observation_start"}
"""Files of older runs lack these: their turns are read without."""
PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
"""What PNG holds without loss; an image of another mode is stored, and comes back, as RGB."""


def write_groups(
    file: Path, groups: Sequence[Group], *, step: int, kept: Sequence[bool] | np.ndarray
) -> None:
    """Store the groups of a step, whole or not at all; `kept` says which the filter kept."""
    need_pyarrow()
    import pyarrow.parquet as pq

    schema = _schema()
    # Dictionary codes are packed into bits: zstd would no longer find that prompts repeat.
    coded: Any = [name for name in schema.names if name not in TOKEN_COLUMNS]
    with (
        replacing(file) as beside,
        pq.ParquetWriter(beside, schema, compression="zstd", use_dictionary=coded) as writer,
    ):
        for group, is_kept in zip(groups, kept, strict=True):
            writer.write_table(_table(schema, group, step, bool(is_kept)))


def read_groups(file: str | Path) -> list[Group]:
    """All groups of a file, as they were written."""
    return list(iter_groups(file))


def iter_groups(file: str | Path) -> Iterator[Group]:
    """One group after the other. A file may lack episodes, but its rows keep their order."""
    rows = (row for _, row in read_rows(Path(file)))
    for _, members in itertools.groupby(rows, lambda row: (row["step"], row["group_id"])):
        yield _group(Path(file), list(members))


def read_rows(
    file: Path, columns: Collection[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and the row: some columns or all, those of tokens as arrays."""
    found = parquet_columns(file)
    wanted = dict.fromkeys(("schema", *(_schema().names if columns is None else columns)))
    missing = [name for name in wanted if name not in found and name not in OPTIONAL_COLUMNS]
    if found and missing:
        raise RunLogError(
            f"{str(file)!r} has no column {missing[0]!r}, which rollouts of schema {SCHEMA} have; "
            f"give a rollout file of a run directory, written by this version"
        )
    there = [name for name in wanted if name in found]
    for where, row in parquet_rows(file, there, TOKEN_COLUMNS):
        if row["schema"] != SCHEMA:
            raise RunLogError(
                f"{where} has schema {row['schema']}, this version reads {SCHEMA}; read it with "
                f"the version that wrote it"
            )
        # Copies, because the arrays of a row are views of a whole batch.
        yield (
            where,
            row
            | {name: row[name].astype(kind) for name, kind in TOKEN_COLUMNS.items() if name in row},
        )


def _schema() -> pa.Schema:
    import pyarrow as pa

    flag, number, text = pa.bool_(), pa.float64(), pa.string()
    columns = {
        "schema": pa.int32(),
        "step": pa.int64(),
        "group_id": pa.int64(),
        "env": text,
        "task_seed": pa.int64(),
        "kept": flag,
        "episode": pa.int32(),
        "episode_seed": pa.int64(),
        "trajectory_reward": number,
        "success": flag,
        "stop": text,
        "metrics": pa.map_(text, number),
        "turn": pa.int32(),
        "observation": text,
        "observation_start": pa.int32(),
        "images": pa.list_(pa.binary()),
        "image_at": pa.list_(pa.int32()),
        "reply": text,
        "turn_reward": number,
        "turn_penalty": number,
        "is_valid": flag,
        "policy_version": pa.int64(),
        "think_start": pa.int32(),
        "think_end": pa.int32(),
        "answer_start": pa.int32(),
        "answer_end": pa.int32(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
    }
    return pa.schema(list(columns.items()))


def _table(schema: pa.Schema, group: Group, step: int, kept: bool) -> pa.Table:
    import pyarrow as pa

    shared = {
        "schema": SCHEMA,
        "step": step,
        "group_id": group.group_id,
        "env": group.env,
        "task_seed": group.task_seed,
        "kept": kept,
    }
    rows = [
        {**shared, **row}
        for episode, trajectory in enumerate(group.trajectories)
        for row in _trajectory_rows(episode, trajectory)
    ]
    arrays = [
        _token_array([row.get(field.name, ()) for row in rows], field.type)
        if field.name in TOKEN_COLUMNS
        else pa.array([row.get(field.name) for row in rows], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _trajectory_rows(episode: int, trajectory: Trajectory) -> Iterator[dict[str, object]]:
    shared = {
        "episode": episode,
        "episode_seed": trajectory.episode_seed,
        # Null, because SQL and pandas leave nulls out of a mean.
        "trajectory_reward": None if trajectory.stop.is_error else trajectory.reward,
        "success": trajectory.success,
        "stop": trajectory.stop.value,
        "metrics": list(trajectory.metrics.items()),
    }
    if not trajectory.turns:
        yield shared
    num_images = 0
    for position, turn in enumerate(trajectory.turns):
        yield {**shared, "turn": position, **_turn_columns(turn, num_images)}
        num_images = len(turn.prompt.images)


def _turn_columns(turn: Turn, num_known: int) -> dict[str, object]:
    """`num_known` images of the prompt are in the rows of earlier turns."""
    think_start, think_end = turn.think_span or (None, None)
    answer_start, answer_end = turn.answer_span or (None, None)
    return {
        "observation": content_text(turn.seen),
        "observation_start": turn.observation_start,
        **_image_columns(turn, num_known),
        "reply": turn.reply,
        "turn_reward": turn.reward,
        "turn_penalty": turn.penalty,
        "is_valid": turn.is_valid,
        "policy_version": turn.policy_version,
        "think_start": think_start,
        "think_end": think_end,
        "answer_start": answer_start,
        "answer_end": answer_end,
        "prompt_ids": turn.prompt.ids,
        "completion_ids": turn.completion_ids,
        "logprobs": turn.logprobs,
    }


def _image_columns(turn: Turn, num_known: int) -> dict[str, object]:
    """New images as PNG, and before which character of `observation` each stands.

    An image of an earlier message, which `observation` does not hold, stands at -1.
    """
    content = turn.seen
    own = content_images(content)
    new = turn.prompt.images[num_known:] or own
    if isinstance(content, str) and not new:
        return {}
    before = [-1] * (len(new) - len(own))
    if isinstance(content, str):
        return {"images": [_to_png(image) for image in new], "image_at": before}
    ends = itertools.accumulate(
        len(part["text"]) if part["type"] == "text" else 0 for part in content
    )
    places = [end for part, end in zip(content, ends, strict=True) if part["type"] == "image"]
    return {"images": [_to_png(image) for image in new], "image_at": before + places}


def _to_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(buffer, "PNG")
    return buffer.getvalue()


def _token_array(rows: Sequence[np.ndarray], kind: pa.ListType) -> pa.ListArray:
    """Lists from arrays without one Python object per token."""
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    values = np.concatenate(rows).astype(kind.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind)


def _group(file: Path, rows: Sequence[Mapping[str, Any]]) -> Group:
    first = rows[0]
    episodes = itertools.groupby(rows, lambda row: row["episode"])
    return Group(
        group_id=first["group_id"],
        env=first["env"],
        task_seed=first["task_seed"],
        trajectories=tuple(_trajectory(file, list(turns)) for _, turns in episodes),
    )


def _trajectory(file: Path, rows: Sequence[Mapping[str, Any]]) -> Trajectory:
    first = rows[0]
    turns = [row for row in rows if row["turn"] is not None]
    if [row["turn"] for row in turns] != list(range(len(turns))):
        raise RunLogError(
            f"{str(file)!r}: episode {first['episode']} of group {first['group_id']} lacks turns; "
            f"keep episodes whole, and rows ordered by step, group_id, episode, turn"
        )
    return Trajectory(
        env=first["env"],
        task_seed=first["task_seed"],
        episode_seed=first["episode_seed"],
        turns=tuple(_turns(turns)),
        stop=StopReason(first["stop"]),
        success=first["success"],
        metrics=dict(first["metrics"]),
    )


def _turns(rows: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    """A row holds the images that its turn added; a prompt has those of all turns up to its own."""
    images: tuple[object, ...] = ()
    for row in rows:
        new = [_from_png(data) for data in row["images"] or ()]
        images = (*images, *new)
        yield _turn(row, Prompt(row["prompt_ids"], images), new)


def _turn(row: Mapping[str, Any], prompt: Prompt, new_images: Sequence[object]) -> Turn:
    return Turn(
        prompt=prompt,
        completion_ids=row["completion_ids"],
        logprobs=row["logprobs"],
        think_span=_span(row["think_start"], row["think_end"]),
        answer_span=_span(row["answer_start"], row["answer_end"]),
        reply=row["reply"],
        seen=_content(row["observation"], new_images, row["image_at"]),
        observation_start=row.get("observation_start"),
        reward=row["turn_reward"],
        penalty=row["turn_penalty"],
        is_valid=row["is_valid"],
        policy_version=row["policy_version"],
    )


def _span(start: int | None, end: int | None) -> Span | None:
    return None if start is None or end is None else (start, end)


def _content(text: str, images: Sequence[object], places: list[int] | None) -> Content:
    """Text with its images back in their places; text parts that touched are one part now."""
    own = [(image, at) for image, at in zip(images, places or (), strict=True) if at >= 0]
    if places is None or (not own and places):
        return text
    images, places = [image for image, _ in own], [at for _, at in own]
    parts: list[TextPart | ImagePart] = []
    for start, stop, image in zip([0, *places], [*places, len(text)], [*images, None], strict=True):
        if start < stop:
            parts.append(TextPart(type="text", text=text[start:stop]))
        if image is not None:
            parts.append(ImagePart(type="image", image=image))
    return parts


def _from_png(data: bytes) -> object:
    try:
        from PIL import Image
    except ImportError as error:
        raise MooredError("pictures need Pillow; run: pip install 'moored[images]'") from error
    image = Image.open(io.BytesIO(data))
    image.load()
    return image
