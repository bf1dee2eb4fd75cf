"""A side-scroller: game.py is the rule book, batch.py plays several games at once, real.py the real NES game."""

from envs.mario.game import ACTIONS, TRAIN_LEVELS, UNSEEN_LEVELS, Episode, MarioGame

__all__ = ["ACTIONS", "TRAIN_LEVELS", "UNSEEN_LEVELS", "Episode", "MarioGame"]
