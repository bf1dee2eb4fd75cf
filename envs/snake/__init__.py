"""Snake: rules.py is the rule book, batch.py plays many games at once in torch."""

from envs.snake.rules import BODY, EMPTY, FOOD, HEAD, MOVES, VARIANTS, Rules, SnakeEnv, render_ansi, render_rgb

__all__ = ["BODY", "EMPTY", "FOOD", "HEAD", "MOVES", "VARIANTS", "Rules", "SnakeEnv", "render_ansi", "render_rgb"]
