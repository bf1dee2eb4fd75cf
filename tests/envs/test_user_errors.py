"""Mistakes in the use of an environment are named where they are made."""

import gymnasium as gym
import pytest

import envs  # noqa: F401  registers the ids
from envs.metta.arena import MettaArena


@pytest.mark.parametrize("env_id", ["Snake-v0", "MarioLike-v0", "MettaArena-v0"])
def test_a_vector_environment_that_would_have_to_draw_is_refused(env_id) -> None:
    with pytest.raises(ValueError, match="render_mode rgb_array: "):
        gym.make_vec(env_id, 6, vectorization_mode="vector_entry_point", render_mode="rgb_array")


def test_the_arena_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="render_mode human: "):
        MettaArena(render_mode="human")
    arena = MettaArena()
    with pytest.raises(ValueError, match="call reset first"):
        arena.step({})
    arena.reset(seed=0)
    with pytest.raises(ValueError, match="one for each of"):
        arena.step({})
