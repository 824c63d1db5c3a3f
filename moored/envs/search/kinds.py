"""What the fictional world consists of: kinds of things and what is told about each, read from
`kinds.yaml`.

A `Relation` leads from a thing to another one, or to a plain value. Its sentence states the fact in
a passage; its phrase names what it leads to in a question, so phrases nest:
`the teacher of` + `the author of` + `the book The Amber Door`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that every thing of a kind has once."""

    name: str
    target: str
    """A kind, or a value: `year`, `trade`, `height`."""
    sentences: list[str]
    """Ways to state it; {short} is the thing, {value} what the fact leads to."""
    phrase: str
    """What it leads to, seen from {x}; for a value, the whole question."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing."""

    share: float
    """Part of all things that are of this kind."""
    intros: list[str]
    """First sentence of a passage; {name} is the thing."""
    short: str
    """The thing in later sentences; {last} is the last word of its name."""
    mention: str
    """The thing in a question."""
    ask: str
    """A question for a thing of this kind; {phrase} stands for it."""
    asides: list[str]
    """Sentences about {other}, a thing of any kind, that no question asks about."""
    relations: tuple[Relation, ...]


def _read_kind(given: dict[str, Any]) -> Kind:
    relations = (Relation(name, **fields) for name, fields in given["relations"].items())
    return Kind(**{**given, "relations": tuple(relations)})


_WORLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
KINDS: dict[str, Kind] = {name: _read_kind(given) for name, given in _WORLD["kinds"].items()}
"""Kinds by name; the shares add up to 1."""
TRADES: list[str] = _WORLD["trades"].split()
