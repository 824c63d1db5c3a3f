"""What each option of a configuration is: kind, default and meaning, read from `moored.config`.

Also the configuration as YAML with the meanings as comments; it reads back as it was.
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from moored.config import Config
from moored.envs.option_types import describe_kind
from moored.names import Registry

WIDTH = 100
BOUNDS: Mapping[type, tuple[str, str]] = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "above"),
    Le: ("le", "at most"),
    Lt: ("lt", "below"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionDoc:
    """One option in words."""

    name: str
    """Dotted: `filter.value`."""
    kind: str
    default: object
    doc: str


def all_options() -> dict[str, OptionDoc]:
    """Every option by its dotted name, in the order of the configuration."""
    return {
        option.name: option for option in _options(Config, "", Config().model_dump(mode="json"))
    }


def section_docs() -> dict[str, str]:
    """What each section is about."""
    return {name: _one_line(section.__doc__) for name, section in _sections(Config, "")}


def annotated_yaml(config: Config) -> str:
    """The configuration as YAML, each option with its meaning."""
    return "".join(f"{line}\n" for line in _lines(Config, config.model_dump(mode="json"), ""))


def to_yaml(value: object) -> str:
    """A value as one writes it behind `key=`."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _options(model: type[BaseModel], path: str, defaults: typing.Any) -> Iterator[OptionDoc]:
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield from _options(section, f"{path}{name}.", defaults[name])
            continue
        yield OptionDoc(
            name=f"{path}{name}",
            kind=_kind(field),
            default=defaults[name],
            doc=_one_line(field.description),
        )
        item = _item_section(field)
        if item is not None:
            yield from _options(item, f"{path}{name}.0.", defaults[name][0])


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield f"{path}{name}", section
            yield from _sections(section, f"{path}{name}.")


def _lines(model: type[BaseModel], values: Mapping[str, typing.Any], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is None:
            yield from _option_lines(name, values[name], _one_line(field.description), indent)
            continue
        yield f"{indent}{name}:  # {_one_line(section.__doc__)}"
        yield from _lines(section, values[name], indent + "  ")


def _option_lines(name: str, value: object, doc: str, indent: str) -> list[str]:
    """The comment stands behind the value where there is room, else above it."""
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True)
    lines = textwrap.indent(text, indent).splitlines()
    if len(lines) == 1 and len(lines[0]) + len(doc) + 4 <= WIDTH:
        return [f"{lines[0]}  # {doc}"]
    start = f"{indent}# "
    above = textwrap.wrap(doc, WIDTH, initial_indent=start, subsequent_indent=start)
    return [*above, *lines]


def _kind(field: FieldInfo) -> str:
    """`a number, at least 0`, `one of 'a', 'b'`, `one of top_p, … or module:attribute`."""
    registry = _registry([*field.metadata, *_nested(field.annotation)])
    words = describe_kind(field.annotation)
    if registry is not None:
        null = " or null" if type(None) in typing.get_args(field.annotation) else ""
        return f"one of {', '.join(registry)}, or module:attribute{null}"
    if _item_section(field) is not None:
        return "a list of environments"
    found = [
        f"{phrase} {getattr(bound, name):g}"
        for bound in field.metadata
        for kind, (name, phrase) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    return ", ".join([words, *found])


def _registry(metadata: Sequence[object]) -> Registry | None:
    """The registry that checks a name, if one does."""
    checks = (entry.func for entry in metadata if isinstance(entry, AfterValidator))
    owners = (getattr(check, "__self__", None) for check in checks)
    return next((owner for owner in owners if isinstance(owner, Registry)), None)


def _nested(annotation: object) -> list[object]:
    """Metadata inside `Annotated[str, …] | None`."""
    found: list[object] = []
    for part in typing.get_args(annotation):
        found += getattr(part, "__metadata__", ())
    return found


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _item_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section of which `field` is a list."""
    parts = typing.get_args(field.annotation)
    is_section = len(parts) == 1 and isinstance(parts[0], type) and issubclass(parts[0], BaseModel)
    return parts[0] if is_section else None


def _one_line(text: str | None) -> str:
    """The first paragraph as one line."""
    return " ".join((text or "").strip().partition("\n\n")[0].split())
