"""Rendering of the side-scroller: gray tiles for agents, RGB images for people."""

from typing import Any

import numpy as np

from envs.drawing import Canvas
from envs.mario.levels import ABYSS, BLOCK, COIN, GRASS, GROUND, PENNANT, PIPE, POLE, RIM, SCREEN, SOIL, START


def gray_art(tile: int) -> np.ndarray:
    """(codes, tile, tile) uint8: gray images of all tile codes, `tile` pixels wide.

    Gaps are black and ground is light, for contrast. Seams between tiles make speed visible.
    """
    art = np.full((10, tile, tile), 120, np.uint8)
    edge = max(tile // 6, 1)
    first = tile // 2 - tile // 6
    end = tile // 2 + tile // 6 + 1
    middle = slice(first, end)
    art[COIN, middle, middle] = 220
    art[POLE:ABYSS, :, middle] = 255
    art[PENNANT, : tile // 2] = 255
    art[ABYSS] = 0
    art[GRASS] = 200
    art[SOIL] = 180
    art[RIM] = 40
    art[PIPE] = 60
    art[BLOCK] = 90
    art[GRASS, : 2 * edge] = 235
    art[GRASS : SOIL + 1, :, -edge:] = 150
    art[RIM, :edge] = 150
    art[BLOCK, -edge:] = 50
    art[BLOCK, :, -edge:] = 50
    return art


DIRT = [
    (0, 0, 1, 1, 0, "#a9714b"),
    (0.2, 0.6, 0.36, 0.7, 0.05, "#8d5a3b"),  # two stones
    (0.65, 0.75, 0.81, 0.85, 0.05, "#8d5a3b"),
]
STICK = [(0.44, 0, 0.56, 1, 0, "#f4f4f4")]
SHAPES = {  # rounded rectangles (left, top, right, bottom, radius, color), in tiles relative to the top left corner
    ABYSS: [(0, 0, 1, 1, 0, "#1e2742")],
    GRASS: [
        *DIRT,
        (0, 0, 1, 0.26, 0, "#5fb84e"),
        (0, 0, 1, 0.1, 0, "#84d66b"),  # lit from above
    ],
    SOIL: DIRT,
    BLOCK: [
        (0.02, 0.02, 0.98, 0.98, 0.12, "#7d6bb3"),
        (0.14, 0.12, 0.86, 0.5, 0.1, "#9a8acb"),
    ],
    COIN: [
        (0.24, 0.16, 0.76, 0.84, 0.26, "#c98a12"),
        (0.3, 0.22, 0.7, 0.78, 0.2, "#f2b632"),
    ],
    POLE: STICK,
    PENNANT: [
        *STICK,
        (-0.5, 0.1, 0.5, 0.65, 0.08, "#e8554e"),
        (-0.4, 0.3, 0.1, 0.45, 0.07, "#ffd9d6"),
    ],
    RIM: [  # for both columns of a pipe
        (0, 0, 2, 1, 0.1, "#2f8f83"),
        (0.15, 0.06, 0.5, 0.94, 0, "#5cc2b3"),
    ],
    PIPE: [
        (0.12, 0, 1.88, 1, 0, "#2f8f83"),
        (0.27, 0, 0.62, 1, 0, "#5cc2b3"),
    ],
    "cloud": [
        (0, 0.14, 0.56, 0.7, 0.28, "#f7fbff"),
        (0.3, -0.14, 1.14, 0.7, 0.4, "#f7fbff"),
        (0.9, 0.1, 1.5, 0.7, 0.28, "#f7fbff"),
    ],
    "hill": [(0, 0, 3.4, 4, 1.7, "#93c3a3")],
    "walker": [
        (0.08, 0.75, 0.38, 1, 0.1, "#3a2a30"),  # feet
        (0.5, 0.75, 0.8, 1, 0.1, "#3a2a30"),
        (0, 0.13, 0.88, 0.85, 0.36, "#c0445a"),
        (0.18, 0.36, 0.38, 0.66, 0.1, "white"),  # eyes
        (0.48, 0.36, 0.68, 0.66, 0.1, "white"),
        (0.2, 0.46, 0.3, 0.62, 0.05, "#1b1b2f"),
        (0.5, 0.46, 0.6, 0.62, 0.05, "#1b1b2f"),
    ],
    "feet": [
        (0.04, 0.8, 0.32, 1, 0.08, "#5a3d2b"),
        (0.43, 0.8, 0.71, 1, 0.08, "#5a3d2b"),
    ],
    "player": [
        (0.06, 0.44, 0.69, 0.92, 0.18, "#2f6fdb"),
        (0, 0.06, 0.75, 0.58, 0.24, "#ffd8b0"),  # head
        (-0.04, -0.08, 0.79, 0.26, 0.17, "#f28a2e"),  # cap
    ],
    "left": [  # peak of the cap, eye
        (-0.24, 0.18, 0.2, 0.26, 0.04, "#d96f17"),
        (0.1, 0.3, 0.22, 0.46, 0.06, "#1b1b2f"),
    ],
    "right": [
        (0.55, 0.18, 0.99, 0.26, 0.04, "#d96f17"),
        (0.53, 0.3, 0.65, 0.46, 0.06, "#1b1b2f"),
    ],
}

TILE = 96  # pixels per tile, before `Canvas` halves the picture
SIDE = TILE * SCREEN


def draw_shape(canvas: Canvas, name: Any, x: float, y: float) -> None:
    """Draws one of SHAPES with its corner at (x, y), in tiles."""
    for left, top, right, bottom, radius, color in SHAPES[name]:
        x1 = round(TILE * (x + left))
        y1 = round(TILE * (y + top))
        x2 = round(TILE * (x + right)) - 1
        y2 = round(TILE * (y + bottom)) - 1
        box = (x1, y1, x2, y2)
        canvas.draw.rounded_rectangle(box, radius * TILE, color)


def render_rgb(game: Any) -> np.ndarray:
    """The screen as (576, 576, 3) uint8, 48 pixels per tile."""
    canvas = Canvas(SIDE, SIDE)
    camera = game.camera / 256
    draw_background(canvas, camera)
    codes = np.frombuffer(game.level.grid, np.uint8).reshape(-1, 16)
    first_column = max(int(camera) - 1, 0)
    for column in range(first_column, int(camera) + SCREEN + 1):
        for row in range(SCREEN):
            code = codes[column, row]
            is_second_half = code in (RIM, PIPE) and codes[column - 1, row] == code
            if code in SHAPES and not is_second_half:
                draw_shape(canvas, code, column - camera, row)
    for x in game.visible():
        draw_shape(canvas, "walker", x / 256 - camera, GROUND - 1)
    x = game.x / 256 - camera
    y = game.y / 256
    crouch = 0.24 if game.grounded and game.held else 0
    draw_shape(canvas, "feet", x, y)
    draw_shape(canvas, "player", x, y + crouch)
    face = "left" if game.left_facing else "right"
    draw_shape(canvas, face, x, y + crouch)
    distance = game.where() - (START << 4)
    title = f"score {game.score}   distance {distance}"
    canvas.text(TILE / 4, TILE / 2, title, TILE * 0.4, "#12324a")
    return canvas.pixels()


def draw_background(canvas: Canvas, camera: float) -> None:
    """Draws sky, clouds and hills with parallax."""
    for y in range(0, SIDE, 8):
        red = 86 + 152 * y // SIDE
        green = 156 + 90 * y // SIDE
        blue = 214 + 36 * y // SIDE
        color = (red, green, blue)
        canvas.draw.rectangle((0, y, SIDE, y + 8), color)
    cloud_shift = camera / 8 % 5
    hill_shift = camera / 3 % 5
    for i in range(5):
        is_odd = i % 2
        draw_shape(canvas, "cloud", i * 5 - cloud_shift - 2, 1 + 0.9 * is_odd)
        draw_shape(canvas, "hill", i * 5 - hill_shift - 3, GROUND - 1 - 0.5 * is_odd)
