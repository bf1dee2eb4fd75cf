"""Drawing tools shared by all games. Pillow is imported on first use, because training does not need it."""

from functools import cache
from typing import Any

import numpy as np


@cache
def font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


class Canvas:
    """A picture drawn at twice its size and halved at the end, for smooth edges. `draw` is a Pillow `ImageDraw`."""

    def __init__(self, width: int, height: int, background: str = "black") -> None:
        from PIL import Image, ImageDraw

        size = (width, height)
        self.image = Image.new("RGB", size, background)
        self.draw = ImageDraw.Draw(self.image)

    def disc(self, x: float, y: float, radius: float, color: Any, outline: Any = None) -> None:
        left = x - radius
        right = x + radius
        top = y - radius
        bottom = y + radius
        box = (left, top, right, bottom)
        self.draw.ellipse(box, color, outline)

    def text(self, x: float, y: float, text: str, size: float, color: str, anchor: str = "lm") -> None:
        """Text whose left edge is at (x, y), vertically centred. `anchor` is Pillow's; "mm" centres it at (x, y)."""
        position = (x, y)
        self.draw.text(position, text, color, font(size), anchor=anchor)

    def pixels(self) -> np.ndarray:
        """The picture as (height / 2, width / 2, 3) uint8."""
        from PIL.Image import Resampling

        width = self.image.width // 2
        height = self.image.height // 2
        size = (width, height)
        image = self.image.resize(size, Resampling.BOX)
        return np.asarray(image)
