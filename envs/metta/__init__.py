"""MettaGrid: arena.py has one arena in Python, batch.py many in PyTorch, real.py the current mettagrid package."""

from envs.metta.arena import MettaArena

__all__ = ["MettaArena"]
