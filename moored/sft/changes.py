"""What differs from one start of a warm start to the next: options that change no number.

Dialogues of a file stay as they were, too; their digest is noted at every start.
"""

from __future__ import annotations

from pathlib import Path

from moored.errors import ConfigError
from moored.runlog.changes import Change, changed_options, is_moved
from moored.runlog.log import read_records
from moored.sft.dialogues import file_digest
from moored.sft.options import SftConfig, load_sft_config, settle

FREE = ("workers", "checkpoint_every")
"""Options on which no weight and no metric depends; all others stay as they were."""

DIALOGUES = "dialogues"
"""A file that was moved or renamed may be named anew; its digest says whether it is the same."""

DIGEST = "dialogues_sha256"
"""Key in `starts.jsonl`."""


def changes_since(run: Path, config: SftConfig) -> dict[str, Change]:
    """What `config` changes in the run's own; raises for what must stay."""
    before = settle(load_sft_config(run / "config.yaml"))
    changes = changed_options(before, settle(config))
    _check_dialogues(run, config, is_other=DIALOGUES in changes)
    for name, change in changes.items():
        if name not in (*FREE, DIALOGUES) and not is_moved(*change.values()):
            raise ConfigError(
                f"{name} cannot change when a warm start is resumed ({change.old!r} to "
                f"{change.new!r}): its numbers may depend on it, and only {' and '.join(FREE)} "
                f"change none; leave it out, or start a new one with model={run / 'model'}"
            )
    return changes


def noted_dialogues(config: SftConfig) -> dict[str, str]:
    """What a start notes of its dialogues; nothing where they come from environments."""
    return {} if config.dialogues is None else {DIGEST: file_digest(config.dialogues)}


def _check_dialogues(run: Path, config: SftConfig, *, is_other: bool) -> None:
    """Raise when the file was edited since the last start that noted its digest.

    One that has another name now (`is_other`) must be known to be the same.
    """
    noted = [start[DIGEST] for start in read_records(run, "starts") if DIGEST in start]
    if config.dialogues is not None and not Path(config.dialogues).is_file():
        raise ConfigError(
            f"there is no file {config.dialogues!r} to learn the dialogues of; put it back, or say "
            f"where it is now: dialogues=FILE"
        )
    now = noted_dialogues(config)
    if is_other and now != {DIGEST: noted[-1] if noted else None}:
        raise ConfigError(
            f"dialogues {config.dialogues!r} are not those that the warm start began with, so it "
            f"cannot go on with them; give a copy of that file, or start a new one with "
            f"model={run / 'model'}"
        )
    if noted and now != {DIGEST: noted[-1]}:
        raise ConfigError(
            f"dialogues {config.dialogues!r} were edited since the warm start began, so it cannot "
            f"go on as it began; put the file back as it was, or start a new one with "
            f"model={run / 'model'}"
        )
