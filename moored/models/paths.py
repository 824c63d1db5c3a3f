"""Paths in the options of a run, made absolute when it starts, so that it goes on in any folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moored.config import OptionsT
from moored.models.find import embedded_models
from moored.names import file_of

PATH_OPTIONS = ("model", "dialogues", "source", "folder", "path")
"""Options in which a single word may name a file or folder; elsewhere it may be anything, such as
the name of a split."""


def resolve_paths(config: OptionsT) -> OptionsT:
    """The configuration with absolute paths of the files and folders that exist.

    Embedded models, hub ids and `module:Class` stay.
    """
    return type(config).model_validate(_resolved("", config.model_dump()))


def _resolved(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _resolved(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(name, item) for item in value]
    return os.path.abspath(value) if isinstance(value, str) and _is_path(name, value) else value


def _is_path(name: str, text: str) -> bool:
    file = file_of(text)
    if name == "model":
        return text not in (*embedded_models(), "smollm2") and os.path.isdir(text)
    if name in PATH_OPTIONS or "/" in file:
        return os.path.exists(file)
    return "." in file and os.path.isfile(file)
