"""A side-scroller: game.py has the rules, batch.py many games at once, real.py the original NES game."""

from envs.mario.game import ACTIONS, TRAIN_LEVELS, UNSEEN_LEVELS, Episode, MarioGame

__all__ = ["ACTIONS", "TRAIN_LEVELS", "UNSEEN_LEVELS", "Episode", "MarioGame"]
