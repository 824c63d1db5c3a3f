"""Options that differ from one start of a warm start to the next: those that change no number."""

from __future__ import annotations

from pathlib import Path

from moored.errors import ConfigError
from moored.runlog.changes import Change, changed_options
from moored.sft.options import SftConfig, load_sft_config, settle

FREE = ("workers", "checkpoint_every")
"""Options on which no weight and no metric depends; all others stay as they were."""


def changes_since(run: Path, config: SftConfig) -> dict[str, Change]:
    """What `config` changes in the run's own; raises for an option that must stay."""
    changes = changed_options(settle(load_sft_config(run / "config.yaml")), settle(config))
    for name, change in changes.items():
        if name not in FREE:
            raise ConfigError(
                f"{name} cannot change when a warm start is resumed ({change.old!r} to "
                f"{change.new!r}): its numbers may depend on it, and only {' and '.join(FREE)} "
                f"change none; leave it out, or start a new one with model={run / 'model'}"
            )
    return changes
