"""A fictional world: passages about linked things, and questions that need one to three of them.

`make_world` draws it from a seed: every thing has a passage that states its facts, each leading to
another thing or to a value, and an aside that leads nowhere. `make_question` walks along facts and
asks for the end, naming only the start.

`kinds.yaml` says what the world consists of. A `Relation` leads from a thing to another one, or to
a plain value. Its sentence states the fact in a passage; its phrase names what it leads to in a
question, so phrases nest: `the teacher of` + `the author of` + `the book The Amber Door`.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moored.envs.search.corpus import Passage
from moored.envs.search.naming import Namer
from moored.envs.search.questions import Question
from moored.errors import EnvError

NUM_PASSAGES = 6000
MAX_HOPS = 3
MAX_WALKS = 1000


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


_WORLD = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
KINDS: dict[str, Kind] = {name: _read_kind(given) for name, given in _WORLD["kinds"].items()}
"""Kinds by name; the shares add up to 1."""
TRADES: list[str] = _WORLD["trades"].split()


@dataclass(slots=True, eq=False)
class Thing:
    """Something a passage is about."""

    kind: str
    name: str
    facts: dict[str, str] = field(default_factory=dict)
    """Relation -> name of the thing it leads to, or the value."""
    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """All things, in order and by name."""

    things: tuple[Thing, ...]
    by_name: dict[str, Thing]
    mentions: dict[str, list[Thing]]
    """Name -> the things whose passages hold it, the thing itself left out."""

    @property
    def passages(self) -> tuple[Passage, ...]:
        return tuple(Passage(thing.name, thing.text) for thing in self.things)

    @property
    def num_facts(self) -> int:
        return sum(len(thing.facts) for thing in self.things)


@functools.lru_cache(maxsize=2)
def make_world(seed: int = 0, num_passages: int = NUM_PASSAGES) -> World:
    """Draw a world; a repeated call is free."""
    rng = random.Random(f"world {seed}")
    namer = Namer(rng)
    counts = {kind: max(1, round(KINDS[kind].share * num_passages)) for kind in KINDS}
    things = [Thing(kind, namer.draw(kind)) for kind in KINDS for _ in range(counts[kind])]
    by_kind: dict[str, list[Thing]] = defaultdict(list)
    for thing in things:
        by_kind[thing.kind].append(thing)
    mentions: dict[str, list[Thing]] = defaultdict(list)
    for thing in things:
        for relation in KINDS[thing.kind].relations:
            thing.facts[relation.name] = _draw_target(rng, relation, thing, by_kind)
        aside = rng.choice(things)
        thing.text = _write_passage(rng, thing, aside)
        for name in {*thing.facts.values(), aside.name}:
            mentions[name].append(thing)
    rng.shuffle(things)
    return World(tuple(things), {thing.name: thing for thing in things}, dict(mentions))


def make_question(world: World, rng: random.Random, num_hops: tuple[int, int]) -> Question:
    """Draw a question of this many hops (lowest, highest) whose answer needs all of them."""
    hops = rng.randint(*num_hops)
    for _ in range(MAX_WALKS):
        walk = _walk(world, rng, hops)
        if walk is not None and _needs_every_hop(world, *walk):
            return _write_question(*walk)
    raise EnvError(f"search: no question of {hops} hops found in {MAX_WALKS} walks; try another")


def _draw_target(
    rng: random.Random, relation: Relation, thing: Thing, by_kind: dict[str, list[Thing]]
) -> str:
    match relation.target:
        case "year":
            return str(rng.randint(1201, 1899))
        case "height":
            return str(rng.randint(1050, 6950))
        case "trade":
            return rng.choice(TRADES)
        case kind:
            others = by_kind[kind]
            target = rng.choice(others)
            while target is thing and len(others) > 1:
                target = rng.choice(others)
            return target.name


def _write_passage(rng: random.Random, thing: Thing, aside: Thing) -> str:
    kind = KINDS[thing.kind]
    short = kind.short.format(name=thing.name, last=thing.name.split()[-1])
    sentences = [
        rng.choice(relation.sentences).format(short=short, value=thing.facts[relation.name])
        for relation in kind.relations
    ]
    other = KINDS[aside.kind].mention.format(name=aside.name)
    sentences.append(rng.choice(kind.asides).format(short=short, other=other))
    rng.shuffle(sentences)
    told = [text[0].upper() + text[1:] for text in sentences]
    return " ".join([rng.choice(kind.intros).format(name=thing.name), *told])


Walk = tuple[list[Thing], list[Relation]]
"""The things that are passed, and the relation that is followed from each."""


def _walk(world: World, rng: random.Random, hops: int) -> Walk | None:
    """Follow random facts from a random thing; None where a value ends the way too early."""
    things, relations = [rng.choice(world.things)], []
    while True:
        relations.append(rng.choice(KINDS[things[-1].kind].relations))
        if len(relations) == hops:
            return things, relations
        following = world.by_name.get(things[-1].facts[relations[-1].name])
        if following is None or following in things:
            return None
        things.append(following)


def _needs_every_hop(world: World, things: list[Thing], relations: list[Relation]) -> bool:
    """Whether the answer stands in no earlier passage, nor beside what the question names."""
    start, last = things[0], things[-1]
    answer = last.facts[relations[-1].name]
    if answer in (thing.name for thing in things):
        return False
    if last is start:
        return True
    beside = [*things[:-1], *world.mentions.get(start.name, [])]
    return not any(_states(thing, answer) for thing in beside)


def _states(thing: Thing, answer: str) -> bool:
    return answer in thing.text or answer == thing.name


def _write_question(things: list[Thing], relations: list[Relation]) -> Question:
    text = KINDS[things[0].kind].mention.format(name=things[0].name)
    for relation in relations:
        text = relation.phrase.format(x=text)
    target = relations[-1].target
    if target in KINDS:
        text = KINDS[target].ask.format(phrase=text)
    way = ", ".join(relation.name for relation in relations)
    return Question(
        text=text,
        answers=(things[-1].facts[relations[-1].name],),
        titles=tuple(thing.name for thing in things),
        key=f"{things[0].name}: {way}",
    )
