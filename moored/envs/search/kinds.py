"""What the fictional world consists of: kinds of things, and what is told about each.

A `Relation` leads from a thing to another one, or to a plain value. Its sentence states the fact in
a passage; its phrase names what it leads to in a question, so phrases nest:
`the teacher of` + `the author of` + `the book The Amber Door`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moored.envs.search.naming import words


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that every thing of a kind has once."""

    name: str
    target: str
    """A kind, or a value: `year`, `trade`, `height`."""
    sentences: tuple[str, ...]
    """Ways to state it; {short} is the thing, {value} what the fact leads to."""
    phrase: str
    """What it leads to, seen from {x}; for a value, the whole question."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing."""

    share: float
    """Part of all things that are of this kind."""
    intros: tuple[str, ...]
    """First sentence of a passage; {name} is the thing."""
    short: str
    """The thing in later sentences; {last} is the last word of its name."""
    mention: str
    """The thing in a question."""
    ask: str
    """A question for a thing of this kind; {phrase} stands for it."""
    asides: tuple[str, ...]
    """Sentences about {other}, a thing of any kind, that no question asks about."""
    relations: tuple[Relation, ...]


VISITS = (
    "An old song tells of {short} and {other}, though nobody knows why.",
    "Letters about {short} often name {other} as well.",
    "A traveller once compared {short} with {other}.",
)
KEEPSAKES = (
    "A stamp shows {short} next to {other}.",
    "Visitors sometimes confuse {short} with {other}.",
    "A painting of {short} was once traded for a painting of {other}.",
)

KINDS: dict[str, Kind] = {
    "person": Kind(
        share=0.34,
        intros=("{name} was a person of some fame.", "{name} is remembered in many letters."),
        short="{last}",
        mention="{name}",
        ask="Who is {phrase}?",
        asides=VISITS,
        relations=(
            Relation(
                "birthplace",
                "town",
                ("{short} was born in {value}.", "The birthplace of {short} was {value}."),
                "the town where {x} was born",
            ),
            Relation(
                "teacher",
                "person",
                ("The teacher of {short} was {value}.", "{short} was taught by {value}."),
                "the teacher of {x}",
            ),
            Relation(
                "guild",
                "guild",
                ("{short} belonged to the {value}.", "{short} was a member of the {value}."),
                "the guild that {x} belonged to",
            ),
            Relation(
                "trade",
                "trade",
                ("{short} worked as a {value}.", "By trade {short} was a {value}."),
                "What was the trade of {x}?",
            ),
        ),
    ),
    "town": Kind(
        share=0.14,
        intros=("{name} is a town.", "{name} is a small walled town."),
        short="{name}",
        mention="the town of {name}",
        ask="What is the name of {phrase}?",
        asides=KEEPSAKES,
        relations=(
            Relation(
                "river",
                "river",
                ("{short} stands on the {value}.", "The {value} runs through {short}."),
                "the river that runs through {x}",
            ),
            Relation(
                "founder",
                "person",
                ("{short} was founded by {value}.", "The founder of {short} was {value}."),
                "the founder of {x}",
            ),
            Relation(
                "year",
                "year",
                ("{short} received its charter in {value}.", "The charter dates from {value}."),
                "In which year did {x} receive its charter?",
            ),
        ),
    ),
    "river": Kind(
        share=0.06,
        intros=("The {name} is a slow river.", "The {name} is a river of many bends."),
        short="the {name}",
        mention="the {name}",
        ask="What is the name of {phrase}?",
        asides=KEEPSAKES,
        relations=(
            Relation(
                "source",
                "mountain",
                ("The river rises on {value}.", "Its source lies on {value}."),
                "the mountain where {x} rises",
            ),
            Relation(
                "surveyor",
                "person",
                ("It was first mapped by {value}.", "{value} drew its first map."),
                "the person who first mapped {x}",
            ),
        ),
    ),
    "mountain": Kind(
        share=0.05,
        intros=("{name} is a lonely mountain.", "{name} is a mountain of grey stone."),
        short="{name}",
        mention="{name}",
        ask="What is the name of {phrase}?",
        asides=KEEPSAKES,
        relations=(
            Relation(
                "climber",
                "person",
                ("{value} was the first to climb it.", "It was first climbed by {value}."),
                "the first person to climb {x}",
            ),
            Relation(
                "height",
                "height",
                ("{short} is {value} metres high.", "Its height is {value} metres."),
                "How many metres high is {x}?",
            ),
        ),
    ),
    "guild": Kind(
        share=0.08,
        intros=("The {name} is a guild.", "The {name} is an old and wealthy guild."),
        short="the {name}",
        mention="the {name}",
        ask="What is the name of {phrase}?",
        asides=KEEPSAKES,
        relations=(
            Relation(
                "seat",
                "town",
                ("The guild has its seat in {value}.", "Its hall stands in {value}."),
                "the town where {x} has its seat",
            ),
            Relation(
                "head",
                "person",
                ("The guild is led by {value}.", "Its head is {value}."),
                "the head of {x}",
            ),
            Relation(
                "year",
                "year",
                ("The guild was formed in {value}.", "Its first meeting was held in {value}."),
                "In which year was {x} formed?",
            ),
        ),
    ),
    "book": Kind(
        share=0.13,
        intros=("{name} is a book.", "{name} is a long book in two parts."),
        short="the book",
        mention="the book {name}",
        ask="What is the title of {phrase}?",
        asides=("Some readers find it close to {other}.", "A footnote in it is about {other}."),
        relations=(
            Relation(
                "author",
                "person",
                ("It was written by {value}.", "The author of the book is {value}."),
                "the author of {x}",
            ),
            Relation(
                "setting",
                "town",
                ("The story is set in {value}.", "All of it takes place in {value}."),
                "the town where the story of {x} is set",
            ),
            Relation(
                "publisher",
                "guild",
                ("It was printed by the {value}.", "The book was published by the {value}."),
                "the guild that published {x}",
            ),
        ),
    ),
    "ship": Kind(
        share=0.07,
        intros=("The {name} is a ship.", "The {name} is a three-masted ship."),
        short="the ship",
        mention="the ship {name}",
        ask="What is the name of {phrase}?",
        asides=("Sailors tell that it once met {other}.", "Its figurehead honours {other}."),
        relations=(
            Relation(
                "builder",
                "guild",
                ("It was built by the {value}.", "The ship was laid down by the {value}."),
                "the guild that built {x}",
            ),
            Relation(
                "captain",
                "person",
                ("Its captain was {value}.", "The ship sailed under {value}."),
                "the captain of {x}",
            ),
            Relation(
                "port",
                "town",
                ("Its home port is {value}.", "The ship is at home in {value}."),
                "the home port of {x}",
            ),
        ),
    ),
    "hall": Kind(
        share=0.07,
        intros=("The {name} is a public building.", "The {name} is a building of red brick."),
        short="the building",
        mention="the {name}",
        ask="What is the name of {phrase}?",
        asides=KEEPSAKES,
        relations=(
            Relation(
                "architect",
                "person",
                ("It was designed by {value}.", "The architect of the building was {value}."),
                "the architect of {x}",
            ),
            Relation(
                "place",
                "town",
                ("The building stands in {value}.", "It is found in {value}."),
                "the town where {x} stands",
            ),
        ),
    ),
    "opera": Kind(
        share=0.06,
        intros=("{name} is an opera.", "{name} is an opera in three acts."),
        short="the opera",
        mention="the opera {name}",
        ask="What is the title of {phrase}?",
        asides=("Critics heard echoes of {other} in it.", "One of its songs mocks {other}."),
        relations=(
            Relation(
                "composer",
                "person",
                ("It was composed by {value}.", "The composer of the opera is {value}."),
                "the composer of {x}",
            ),
            Relation(
                "stage",
                "hall",
                ("It was first performed in the {value}.", "Its first stage was the {value}."),
                "the building where {x} was first performed",
            ),
        ),
    ),
}
"""Kinds by name; the shares add up to 1."""

TRADES = words(
    "glassblower weaver beekeeper cooper mapmaker bellfounder tanner baker clockmaker printer "
    "potter miller shipwright goldsmith herbalist locksmith painter fiddler bookbinder "
    "candlemaker ropemaker stonemason falconer dyer brewer sailmaker carver tailor "
    "wheelwright chandler lensmaker papermaker saddler thatcher basketmaker charcoal-burner "
    "ferryman stargazer"
)
