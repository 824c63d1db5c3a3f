"""Boards as pictures: one painted tile per symbol, and the tiles of Sokoban.

A painter draws one symbol on a square canvas. It is called once for each tile size, on a canvas
several times larger that is then scaled down, so edges come out smooth at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from moored.errors import EnvError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Painter = Callable[["ImageDraw", int], None]
"""Draws one symbol; the second argument is the side of the canvas in pixels."""

OVERSAMPLING = 8


def draw_tiles(rows: Sequence[str], painters: Mapping[str, Painter], tile_px: int) -> Image:
    """Paint rows of symbols as an RGB picture, `tile_px` pixels per tile."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvError("pictures need Pillow; run: pip install 'moored[images]'") from error
    picture = Image.new("RGB", (len(rows[0]) * tile_px, len(rows) * tile_px))
    for row, symbols in enumerate(rows):
        for col, symbol in enumerate(symbols):
            picture.paste(_paint(painters[symbol], tile_px), (col * tile_px, row * tile_px))
    return picture


@lru_cache(maxsize=256)
def _paint(painter: Painter, tile_px: int) -> Image:
    from PIL import Image, ImageDraw

    side = tile_px * OVERSAMPLING
    canvas = Image.new("RGB", (side, side))
    painter(ImageDraw.Draw(canvas), side)
    return canvas.reduce(OVERSAMPLING)


def inset(side: int, left: float, top: float, right: float, bottom: float) -> tuple[float, ...]:
    """A box from fractions of the tile's side, measured from its own edges."""
    return (side * left, side * top, side * (1 - right) - 1, side * (1 - bottom) - 1)


_FLOOR, _FLOOR_EDGE = "#efe9dc", "#ddd4c0"
_BRICK, _MORTAR = "#5b6472", "#39404b"
_TARGET = "#d7263d"
_CRATE, _CRATE_EDGE = "#d9963f", "#7a4a12"
_DONE, _DONE_EDGE = "#3fae5a", "#14592a"
_SKIN, _SHIRT, _OUTLINE = "#f6cfa4", "#1f6fd6", "#0d2f5e"


def _paint_floor(draw: ImageDraw, side: int) -> None:
    draw.rectangle((0, 0, side, side), fill=_FLOOR_EDGE)
    draw.rectangle(inset(side, 0, 0, 1 / 32, 1 / 32), fill=_FLOOR)


def _paint_wall(draw: ImageDraw, side: int) -> None:
    draw.rectangle((0, 0, side, side), fill=_MORTAR)
    gap, course = side / 16, side / 4
    for layer in range(4):
        shift = side / 4 if layer % 2 else 0.0
        for brick in range(-1, 2):
            left, top = brick * side / 2 + shift, layer * course
            draw.rectangle((left, top, left + side / 2 - gap, top + course - gap), fill=_BRICK)


def _paint_target(draw: ImageDraw, side: int) -> None:
    _paint_floor(draw, side)
    draw.ellipse(inset(side, 0.14, 0.14, 0.14, 0.14), outline=_TARGET, width=round(side * 0.11))
    draw.ellipse(inset(side, 0.39, 0.39, 0.39, 0.39), fill=_TARGET)


def _paint_box(draw: ImageDraw, side: int) -> None:
    _paint_floor(draw, side)
    frame, beam = inset(side, 0.08, 0.08, 0.08, 0.08), round(side * 0.1)
    left, top, right, bottom = inset(side, 0.14, 0.14, 0.14, 0.14)
    draw.rectangle(frame, fill=_CRATE)
    draw.line((left, top, right, bottom), fill=_CRATE_EDGE, width=beam)
    draw.line((left, bottom, right, top), fill=_CRATE_EDGE, width=beam)
    draw.rectangle(frame, outline=_CRATE_EDGE, width=beam)


def _paint_box_on_target(draw: ImageDraw, side: int) -> None:
    _paint_floor(draw, side)
    frame = inset(side, 0.08, 0.08, 0.08, 0.08)
    draw.rectangle(frame, fill=_DONE, outline=_DONE_EDGE, width=round(side * 0.1))
    tick = [(side * x, side * y) for x, y in ((0.27, 0.52), (0.44, 0.69), (0.74, 0.33))]
    draw.line(tick, fill="white", width=round(side * 0.12), joint="curve")


def _paint_figure(draw: ImageDraw, side: int) -> None:
    line = round(side * 0.04)
    draw.rounded_rectangle(
        inset(side, 0.22, 0.5, 0.22, 0.06), side * 0.16, fill=_SHIRT, outline=_OUTLINE, width=line
    )
    draw.ellipse(inset(side, 0.3, 0.08, 0.3, 0.48), fill=_SKIN, outline=_OUTLINE, width=line)
    for left in (0.4, 0.54):
        draw.ellipse(inset(side, left, 0.25, 1 - left - 0.07, 0.67), fill=_OUTLINE)


def _paint_player(draw: ImageDraw, side: int) -> None:
    _paint_floor(draw, side)
    _paint_figure(draw, side)


def _paint_player_on_target(draw: ImageDraw, side: int) -> None:
    _paint_floor(draw, side)
    draw.ellipse(inset(side, 0.03, 0.03, 0.03, 0.03), outline=_TARGET, width=round(side * 0.11))
    _paint_figure(draw, side)


SOKOBAN_TILES: Mapping[str, Painter] = {
    "#": _paint_wall,
    "_": _paint_floor,
    "O": _paint_target,
    "√": _paint_box_on_target,
    "X": _paint_box,
    "P": _paint_player,
    "S": _paint_player_on_target,
}
"""Tile art of Sokoban's symbols; `SOKOBAN_LEGEND` says in words what it shows."""

SOKOBAN_LEGEND = (
    "grey bricks = wall, orange crate with a cross = box, red ring with a dot = target, "
    "green crate with a white tick = box on target, person in blue = player, "
    "person in blue inside a red ring = player on target, plain tile = floor"
)
