"""Names for things that do not exist, each of them used once."""

from __future__ import annotations

import random

from moored.envs.search.scoring import normalize_answer
from moored.errors import EnvError


def words(text: str) -> tuple[str, ...]:
    """Words between spaces."""
    return tuple(text.split())


FIRST_NAMES = words(
    "Alda Anselm Aveline Bastian Berin Brida Calder Cosima Dagny Dorian Edda Elric Enna Fabian "
    "Ferris Freya Gerda Godwin Hanne Hesper Idris Ilse Isolde Jarek Jorun Kasimir Kestrel Lena "
    "Leopold Linnea Magnus Maren Mirabel Nadia Niklas Odette Orrin Oswin Perrin Petra Quentin "
    "Ragna Rowan Runa Sabine Sigrid Silvan Tamsin Tobias Ulla Ulric Verena Viggo Wanda Wystan "
    "Xenia Yorick Ysolde Zelda Zoran"
)
STARTS = words(
    "Ald Ash Bar Bel Bram Cal Car Dal Dor Elm Fal Fen Gar Glen Hal Har Hol Ist Jor Kel Kir Lan "
    "Lor Mal Mar Mor Nor Ost Pel Quar Ros Sal Sel Tar Thorn Ulm Var Vel Wend Yar"
)
MIDDLES = words("a e i o u an el en ir or")
PERSON_ENDS = words("bach brand court dell fenn gard holt lind mann mere quist rell sen strom wick")
TOWN_ENDS = words("berg bridge brook bury dale ford gate ham haven hollow market minster stow ton")
RIVER_ENDS = words("ba den dra la len mar na ra rin sel tha vra")
PEAK_ENDS = words("dor gal horn kar mund nak rath stol tor vik zan")
ADJECTIVES = words(
    "Amber Ancient Azure Barren Bitter Blind Brazen Bright Broken Burning Copper Crimson "
    "Crooked Crystal Distant Drowned Eastern Empty Fallen Final Forgotten Frozen Gentle Gilded "
    "Golden Hidden Hollow Idle Iron Ivory Jade Last Lonely Lost Marble Midnight Narrow Northern "
    "Pale Patient Quiet Restless Ruined Sacred Scarlet Second Secret Silent Silver Sleeping "
    "Southern Stolen Sunken Tangled Tender Velvet Violet Wandering Western Wooden"
)
NOUNS = words(
    "Anchor Arrow Bell Bridge Candle Castle Chapel Clock Compass Cradle Crown Dagger Door "
    "Feather Forest Fountain Garden Gate Glacier Harbour Harp Harvest Helmet Island Key Ladder "
    "Lantern Letter Loom Mask Meadow Mirror Needle Oak Orchard Palace Pearl Pillar Quarry Quill "
    "Ribbon Road Saddle Shadow Shore Spindle Spring Staircase Storm Sundial Table Thimble "
    "Throne Tide Tower Valley Vineyard Wall Well Window"
)
BIRDS = words(
    "Albatross Bittern Cormorant Crane Curlew Dove Eider Falcon Finch Gannet Goose Gull Heron "
    "Ibis Kite Lark Linnet Magpie Merlin Osprey Pelican Petrel Plover Raven Sandpiper Snipe "
    "Sparrow Starling Swallow Swan Swift Tern Thrush Wren"
)
CRAFTS = words("Guild Company Society Brotherhood Lodge")
ROOMS = words("Hall Museum Theatre Library Gallery Arcade")
MAX_TRIES = 1000


class Namer:
    """Draws names; no two are equal after normalisation, whatever their kinds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def draw(self, kind: str) -> str:
        """A new name for a thing of this kind."""
        for _ in range(MAX_TRIES):
            name = self._propose(kind)
            key = normalize_answer(name)
            if key not in self._used:
                self._used.add(key)
                return name
        raise EnvError(
            f"search: no unused name for another {kind} found in {MAX_TRIES} draws; "
            f"ask for fewer passages"
        )

    def _propose(self, kind: str) -> str:
        pick = self._rng.choice
        match kind:
            case "person":
                return f"{pick(FIRST_NAMES)} {self._coin(PERSON_ENDS)}"
            case "town":
                return self._coin(TOWN_ENDS)
            case "river":
                return f"River {self._coin(RIVER_ENDS)}"
            case "mountain":
                return f"Mount {self._coin(PEAK_ENDS)}"
            case "guild":
                return f"{pick(ADJECTIVES)} {pick(NOUNS)} {pick(CRAFTS)}"
            case "book":
                return f"The {pick(ADJECTIVES)} {pick(NOUNS)}"
            case "ship":
                return f"{pick(ADJECTIVES)} {pick(BIRDS)}"
            case "hall":
                return f"{self._coin(PERSON_ENDS)} {pick(ROOMS)}"
            case _:
                return " and ".join(self._rng.sample(NOUNS, 2))

    def _coin(self, ends: tuple[str, ...]) -> str:
        middle = self._rng.choice(["", "", *MIDDLES])
        return self._rng.choice(STARTS) + middle + self._rng.choice(ends)
