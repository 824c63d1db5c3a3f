"""Score matrices of a run: `scores/step_000010.npz`, a few looks spread over the run.

A matrix holds what MI is computed from, the log-likelihood of each reasoning under each prompt. The
first look, the newest one and about `MOST` in between are stored, in half precision: enough for a
picture, and some kilobytes each. Which looks those are follows from step and options alone, so a
resumed run ends with the same files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from moored.errors import RunLogError
from moored.runlog.log import SCHEMA, replacing, step_of_file
from moored.types import ScoreMatrix

MOST = 8
"""Looks that stay, besides the first and the newest."""


def write_scores(
    run: Path, step: int, matrices: Mapping[str, ScoreMatrix], *, every: int, num_steps: int
) -> None:
    """Store the matrices of a look, by the name of its view; drop those that make room for it."""
    if not matrices:
        return
    arrays = {"schema": np.array(SCHEMA), "step": np.array(step), "views": np.array([*matrices])}
    for number, matrix in enumerate(matrices.values()):
        arrays[f"logp_MN_{number}"] = matrix.logp_MN.astype(np.float16)
        arrays[f"columns_M_{number}"] = matrix.columns_M.astype(np.int32)
        arrays[f"blocks_M_{number}"] = matrix.blocks_M.astype(np.int32)
    folder = run / "scores"
    with replacing(folder / f"step_{step:06d}.npz") as beside, beside.open("wb") as handle:
        np.savez_compressed(handle, **arrays)  # pyright: ignore[reportArgumentType]
    for file in stored_scores(run):
        number = step_of_file(file)
        if number < step and not _stays(number, every, num_steps):
            file.unlink(missing_ok=True)


def _stays(step: int, every: int, num_steps: int) -> bool:
    """The first look, and every k-th, so that about `MOST` stay over the whole run."""
    stride = max(1, math.ceil(num_steps / every / MOST))
    return step == 1 or (step % every == 0 and step // every % stride == 0)


def stored_scores(run: Path) -> list[Path]:
    """Files of score matrices, oldest first."""
    return sorted((run / "scores").glob("step_*.npz"), key=step_of_file)


def read_scores(file: Path) -> dict[str, ScoreMatrix]:
    """The matrices of one look by the name of their view."""
    try:
        with np.load(BytesIO(file.read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        schema, views = int(arrays["schema"]), arrays["views"].tolist()
        found = {
            str(view): ScoreMatrix(
                logp_MN=arrays[f"logp_MN_{number}"].astype(float),
                columns_M=arrays[f"columns_M_{number}"],
                blocks_M=arrays[f"blocks_M_{number}"],
            )
            for number, view in enumerate(views)
        }
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise RunLogError(f"cannot read {str(file)!r}: {error}") from error
    if schema != SCHEMA:
        raise RunLogError(f"{str(file)!r} has schema {schema}, this version reads {SCHEMA}")
    return found
