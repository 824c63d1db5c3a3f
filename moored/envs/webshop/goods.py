"""What the generated shop may sell: kinds of products, their attributes, options and prices, read
from `goods.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of product."""

    query: str
    names: list[str]
    """How titles call it."""
    uses: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Department:
    """Kinds that share attributes and options; the path of a product is `path › query`."""

    path: str
    attributes: list[str]
    options: Mapping[str, list[str]]
    prices: list[float]
    kinds: tuple[Kind, ...]


def _read_department(given: dict[str, Any]) -> Department:
    kinds = (Kind(query, **fields) for query, fields in given["kinds"].items())
    return Department(**{**given, "kinds": tuple(kinds)})


_GIVEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DEPARTMENTS = tuple(map(_read_department, _GIVEN))
