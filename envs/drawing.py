"""What the pictures of all games have in common. Pillow is only imported once something is drawn."""

from functools import cache
from typing import Any

import numpy as np


@cache
def font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


class Canvas:
    """A picture that is drawn twice as large and then halved, for smooth edges; `draw` is Pillow's."""

    def __init__(self, width: int, height: int, background: str = "black") -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (width, height), background)
        self.draw = ImageDraw.Draw(self.image)

    def disc(self, x: float, y: float, radius: float, color: Any, outline: Any = None) -> None:
        left = x - radius
        right = x + radius
        top = y - radius
        bottom = y + radius
        self.draw.ellipse((left, top, right, bottom), color, outline)

    def text(self, x: float, y: float, text: str, size: float, color: str, anchor: str = "lm") -> None:
        """Text with its left edge at (x, y); anchor "mm" centres it there."""
        self.draw.text((x, y), text, color, font(size), anchor=anchor)

    def pixels(self) -> np.ndarray:
        """(height / 2, width / 2, 3) uint8."""
        from PIL.Image import Resampling

        width = self.image.width // 2
        height = self.image.height // 2
        halved = self.image.resize((width, height), Resampling.BOX)
        return np.asarray(halved)
