"""What a MettaGrid arena looks like to people: in text, and as a picture."""

from typing import Any

import numpy as np

from envs.drawing import Canvas
from envs.metta.rules import ITEMS, MOVES, VIEW

EDGE = VIEW - 1  # rows and columns left out on each side: one ring of the outer wall is enough

BACKGROUND = "#0f1420"
FLOOR = ("#1d2638", "#1a2233")  # in turn
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
    """One sign for each agent: 0 to 9, a to z, then + for all others."""
    return "0123456789abcdefghijklmnopqrstuvwxyz"[index] if index < 36 else "+"


def converter_sign(name: str) -> str:
    """Initial of its name; H for the altar, that makes hearts, B for the lab, that makes blueprints."""
    return {"altar": "H", "lab": "B"}.get(name, name[0].upper())


def contents(thing: Any) -> dict[str, int]:
    """The items in a thing, and how many of each."""
    return {item: number for item, number in zip(ITEMS, thing.inventory) if number}


def render_ansi(arena: Any) -> str:
    """The map in text, two signs a cell, and what each agent carries.

    An agent is an arrow (* while frozen) and its number, a converter its letter (`converter_sign`) and how many
    products wait in it (~ none yet, but at work or cooling), [] a block and ## a wall.
    """

    def signs(thing: Any) -> str:
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
        lines.append("".join(signs(thing) for thing in row[EDGE:-EDGE]))
    for i, body in enumerate(arena.bodies):
        load = ", ".join(f"{number} {item}" for item, number in contents(body).items())
        lines.append(f"{agent_sign(i)}: {load or 'nothing'}")
    return "\n".join(lines)


SIZE = 40  # pixels along a cell, before the picture is halved


def render_rgb(arena: Any) -> np.ndarray:
    """The map as (height, width, 3) uint8, 20 pixels a cell, beside it what each agent carries.

    A converter has the color and initial of what it makes, waiting products as dots along its foot, what was put in
    along its top, and a bar that shrinks while it works and cools. An agent wears its number and looks where it faces;
    a ring of ice is melting around a frozen one, and its load lies under it.
    """
    map_rows, map_columns = arena.rules.shape
    rows = map_rows - 2 * EDGE
    columns = map_columns - 2 * EDGE
    list_rows = len(arena.bodies) + 2
    canvas = Canvas((columns + 9) * SIZE, max(rows, list_rows) * SIZE, BACKGROUND)
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
        draw_dots(canvas, contents(body), x, y + 0.4 * SIZE)
        line = (i + 2.5) * SIZE
        draw_agent(canvas, arena, i, list_left + SIZE / 4, line)
        for slot, (item, number) in enumerate(contents(body).items()):
            x = list_left + (1.2 + 1.25 * slot) * SIZE
            canvas.disc(x, line, 8, ITEM_COLORS[item])
            canvas.text(x + 12, line, str(number), 0.45 * SIZE, TEXT)
    return canvas.pixels()


def draw_thing(canvas: Canvas, arena: Any, thing: Any, left: float, top: float) -> None:
    """A wall, a block or a converter, its corner at (left, top)."""
    right = left + SIZE - 1
    bottom = top + SIZE - 1
    if thing.name == "wall":
        canvas.draw.rectangle((left, top, right, bottom), WALL_COLOR)
        return
    if thing.name == "block":
        canvas.draw.rectangle((left + 5, top + 5, right - 5, bottom - 5), BLOCK_COLOR)
        return
    recipe = arena.rules.book[thing.name]
    first_product = next(iter(recipe.outputs))
    color = ITEM_COLORS[first_product]
    x = left + SIZE / 2
    y = top + SIZE / 2
    canvas.draw.rounded_rectangle((left + 2, top + 2, right - 2, bottom - 2), 8, CONVERTER_COLOR, color, 3)
    canvas.text(x, y - 1, converter_sign(thing.name), 0.55 * SIZE, color, anchor="mm")
    products = contents(thing)
    inputs = {item: products.pop(item) for item in list(products) if item not in recipe.outputs}
    draw_dots(canvas, inputs, x, top + 0.14 * SIZE)
    draw_dots(canvas, products, x, top + 0.88 * SIZE)
    if thing.timer:
        bar = (SIZE - 12) * thing.timer / (recipe.cooldown + 1)
        canvas.draw.rectangle((left + 6, top + 0.7 * SIZE, left + 6 + bar, top + 0.75 * SIZE), color)


def draw_dots(canvas: Canvas, items: dict[str, int], x: float, y: float) -> None:
    """At most five items in a row, its middle at (x, y)."""
    dots = [item for item, number in items.items() for _ in range(number)][:5]
    middle = (len(dots) - 1) / 2
    for i, item in enumerate(dots):
        offset = (i - middle) * 0.2 * SIZE
        canvas.disc(x + offset, y, 4.5, ITEM_COLORS[item], BACKGROUND)


def draw_agent(canvas: Canvas, arena: Any, i: int, x: float, y: float) -> None:
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
    canvas.text(x, y, agent_sign(i), 0.55 * SIZE, BACKGROUND, anchor="mm")
