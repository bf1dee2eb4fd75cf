"""Rendering of a MettaGrid arena as text or as an RGB image."""

from typing import Any

import numpy as np

from envs.drawing import Canvas
from envs.metta.rules import ITEMS, MOVES, VIEW

EDGE = VIEW - 1  # rows and columns not drawn on each side; one ring of the outer wall remains

BACKGROUND = "#0f1420"
FLOOR = ("#1d2638", "#1a2233")  # checkerboard
WALL_COLOR = "#3a4459"
BLOCK_COLOR = "#8a7358"
CONVERTER_COLOR = "#252f45"
ICE = "#bff3ff"
TEXT = "#e8edf7"
ITEM_COLORS = {
    "ore_red": "#c0763b",
    "ore_blue": "#5b8def",
    "ore_green": "#57b26a",
    "battery_red": "#f2c14e",
    "battery_blue": "#7fb2ff",
    "battery_green": "#8fdc9b",
    "heart": "#ff5a6e",
    "armor": "#b9c4d6",
    "laser": "#5ee6f5",
    "blueprint": "#d58cff",
}


def agent_sign(index: int) -> str:
    """0 to 9, a to z, then + for all other agents."""
    return "0123456789abcdefghijklmnopqrstuvwxyz"[index] if index < 36 else "+"


def converter_sign(name: str) -> str:
    """Initial of the name, except H for the altar (hearts) and B for the lab (blueprints)."""
    if name == "altar":
        return "H"
    if name == "lab":
        return "B"
    return name[0].upper()


def contents(thing: Any) -> dict[str, int]:
    """Items in a thing's inventory and their numbers."""
    inventory = zip(ITEMS, thing.inventory)
    return {item: number for item, number in inventory if number}


def render_ansi(arena: Any) -> str:
    """The map as text, two characters per cell, and the agents' inventories.

    An agent is an arrow (* while frozen) and its sign; a converter is its sign and its number of outputs (~ for none
    during work and cooldown); [] is a block and ## a wall.
    """

    def cell_text(thing: Any) -> str:
        if thing is None:
            return " ."
        if thing.name == "wall":
            return "##"
        if thing.name == "block":
            return "[]"
        if thing.name == "agent":
            arrow = "*" if thing.timer else "▲▼◀▶"[thing.heading]
            return arrow + agent_sign(arena.bodies.index(thing))
        recipe = arena.rules.book[thing.name]
        stock = sum(thing.inventory[ITEMS.index(item)] for item in recipe.outputs)
        if stock:
            state = str(min(stock, 9))
        elif thing.timer:
            state = "~"
        else:
            state = "0"
        return converter_sign(thing.name) + state

    lines = [f"step {arena.clock} of {arena.limit}"]
    for row in arena.grid[EDGE:-EDGE]:
        cells = row[EDGE:-EDGE]
        lines.append("".join(cell_text(thing) for thing in cells))
    for i, body in enumerate(arena.bodies):
        items = [f"{number} {item}" for item, number in contents(body).items()]
        inventory = ", ".join(items) or "nothing"
        lines.append(f"{agent_sign(i)}: {inventory}")
    return "\n".join(lines)


SIZE = 40  # pixels per cell, before `Canvas` halves the picture


def render_rgb(arena: Any) -> np.ndarray:
    """The map as (height, width, 3) uint8, 20 pixels per cell, with a list of the agents' inventories on the right.

    A converter has the color of its output, outputs as dots at the bottom, inputs as dots at the top, and a bar that
    shrinks during work and cooldown. An agent is a disc with its sign, a nose for its heading and dots for its items;
    a frozen agent has a ring that shrinks.
    """
    map_rows, map_columns = arena.rules.shape
    rows = map_rows - 2 * EDGE
    columns = map_columns - 2 * EDGE
    list_rows = len(arena.bodies) + 2
    width = (columns + 9) * SIZE
    height = max(rows, list_rows) * SIZE
    canvas = Canvas(width, height, BACKGROUND)
    for row in range(rows):
        for column in range(columns):
            thing = arena.grid[row + EDGE][column + EDGE]
            left = column * SIZE
            top = row * SIZE
            floor_color = FLOOR[(row + column) % 2]
            canvas.draw.rectangle((left, top, left + SIZE - 1, top + SIZE - 1), floor_color)
            if thing is not None and thing.name != "agent":
                draw_thing(canvas, arena, thing, left, top)

    list_left = columns * SIZE + SIZE / 2
    canvas.text(list_left, SIZE, f"step {arena.clock} of {arena.limit}", 0.55 * SIZE, TEXT)
    for i, body in enumerate(arena.bodies):
        x = (body.column - EDGE + 0.5) * SIZE
        y = (body.row - EDGE + 0.5) * SIZE
        draw_agent(canvas, arena, i, x, y)
        items = contents(body)
        draw_dots(canvas, items, x, y + 0.4 * SIZE)
        line = (i + 2.5) * SIZE
        draw_agent(canvas, arena, i, list_left + SIZE / 4, line)
        x = list_left + 1.2 * SIZE
        for item, number in items.items():
            canvas.disc(x, line, 8, ITEM_COLORS[item])
            canvas.text(x + 12, line, str(number), 0.45 * SIZE, TEXT)
            x += 1.25 * SIZE
    return canvas.pixels()


def draw_thing(canvas: Canvas, arena: Any, thing: Any, left: float, top: float) -> None:
    """Draws a wall, a block or a converter with its corner at (left, top)."""
    right = left + SIZE - 1
    bottom = top + SIZE - 1
    if thing.name == "wall":
        canvas.draw.rectangle((left, top, right, bottom), WALL_COLOR)
        return
    if thing.name == "block":
        canvas.draw.rectangle((left + 5, top + 5, right - 5, bottom - 5), BLOCK_COLOR)
        return
    recipe = arena.rules.book[thing.name]
    first_output = next(iter(recipe.outputs))
    color = ITEM_COLORS[first_output]
    x = left + SIZE / 2
    y = top + SIZE / 2
    box = (left + 2, top + 2, right - 2, bottom - 2)
    canvas.draw.rounded_rectangle(box, 8, CONVERTER_COLOR, color, 3)
    sign = converter_sign(thing.name)
    canvas.text(x, y - 1, sign, 0.55 * SIZE, color, anchor="mm")
    inputs = {}
    outputs = {}
    for item, number in contents(thing).items():
        if item in recipe.outputs:
            outputs[item] = number
        else:
            inputs[item] = number
    draw_dots(canvas, inputs, x, top + 0.14 * SIZE)
    draw_dots(canvas, outputs, x, top + 0.88 * SIZE)
    if thing.timer:
        duration = recipe.cooldown + 1
        bar_right = left + 6 + (SIZE - 12) * thing.timer / duration
        bar = (left + 6, top + 0.7 * SIZE, bar_right, top + 0.75 * SIZE)
        canvas.draw.rectangle(bar, color)


def draw_dots(canvas: Canvas, items: dict[str, int], x: float, y: float) -> None:
    """Draws a row of at most five dots, one per item, centred on (x, y)."""
    dots = []
    for item, number in items.items():
        dots += [item] * number
    dots = dots[:5]
    middle = (len(dots) - 1) / 2
    for i, item in enumerate(dots):
        offset = (i - middle) * 0.2 * SIZE
        canvas.disc(x + offset, y, 4.5, ITEM_COLORS[item], BACKGROUND)


def draw_agent(canvas: Canvas, arena: Any, i: int, x: float, y: float) -> None:
    """Draws agent i, centred on (x, y)."""
    body = arena.bodies[i]
    hue = i * 360 // len(arena.bodies)
    color = f"hsl({hue}, 65%, 62%)"
    down, across = MOVES[body.heading]
    radius = 0.36 * SIZE
    nose = (x + across * 0.5 * SIZE, y + down * 0.5 * SIZE)
    cheek = (x + down * radius, y + across * radius)
    other_cheek = (x - down * radius, y - across * radius)
    canvas.draw.polygon((nose, cheek, other_cheek), color)
    canvas.disc(x, y, radius, color)
    if body.timer:
        reach = 0.46 * SIZE
        angle = 360 * body.timer / arena.rules.freeze
        box = (x - reach, y - reach, x + reach, y + reach)
        canvas.draw.arc(box, -90, -90 + angle, ICE, 5)
    sign = agent_sign(i)
    canvas.text(x, y, sign, 0.55 * SIZE, BACKGROUND, anchor="mm")
