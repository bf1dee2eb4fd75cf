"""The arena: arena.py is the rule book, batch.py plays many games at once in torch, real.py is the real MettaGrid."""

from envs.metta.arena import MettaArena

__all__ = ["MettaArena"]
