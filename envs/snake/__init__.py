"""Snake: rules.py has the rules and one game in Python, batch.py many games in PyTorch."""

from envs.snake.rules import BODY, EMPTY, FOOD, HEAD, MOVES, VARIANTS, Rules, SnakeEnv, render_ansi, render_rgb

__all__ = ["BODY", "EMPTY", "FOOD", "HEAD", "MOVES", "VARIANTS", "Rules", "SnakeEnv", "render_ansi", "render_rgb"]
