"""What differs from one start of a warm start to the next: options that change no number.

Dialogues of a file stay as they were, too; their digest is noted at every start.
"""

from __future__ import annotations

from pathlib import Path

from moored.errors import ConfigError
from moored.runlog.changes import Change, changed_options
from moored.runlog.log import read_records
from moored.sft.dialogues import file_digest
from moored.sft.options import SftConfig, load_sft_config, settle

FREE = ("workers", "checkpoint_every")
"""Options on which no weight and no metric depends; all others stay as they were."""

DIGEST = "dialogues_sha256"
"""Key in `starts.jsonl`."""


def changes_since(run: Path, config: SftConfig) -> dict[str, Change]:
    """What `config` changes in the run's own; raises for what must stay."""
    changes = changed_options(settle(load_sft_config(run / "config.yaml")), settle(config))
    for name, change in changes.items():
        if name not in FREE:
            raise ConfigError(
                f"{name} cannot change when a warm start is resumed ({change.old!r} to "
                f"{change.new!r}): its numbers may depend on it, and only {' and '.join(FREE)} "
                f"change none; leave it out, or start a new one with model={run / 'model'}"
            )
    _check_dialogues(run, config)
    return changes


def noted_dialogues(config: SftConfig) -> dict[str, str]:
    """What a start notes of its dialogues; nothing where they come from environments."""
    return {} if config.dialogues is None else {DIGEST: file_digest(config.dialogues)}


def _check_dialogues(run: Path, config: SftConfig) -> None:
    """Raise when the file was edited since the last start that noted its digest."""
    noted = [start[DIGEST] for start in read_records(run, "starts") if DIGEST in start]
    if noted and noted_dialogues(config) != {DIGEST: noted[-1]}:
        raise ConfigError(
            f"dialogues {config.dialogues!r} were edited since the warm start began, so it cannot "
            f"go on as it began; put the file back as it was, or start a new one with "
            f"model={run / 'model'}"
        )
