"""Games as Gymnasium environments. Importing this registers their ids and does nothing else."""

from gymnasium.envs.registration import register

from envs.snake import VARIANTS

for _id, _rules in VARIANTS.items():
    register(_id, "envs.snake:SnakeEnv", vector_entry_point="envs.snake:SnakeVectorEnv", kwargs=_rules)
register("MarioLike-v0", "envs.mario:MarioEnv", vector_entry_point="envs.mario:MarioVectorEnv")
register("SuperMarioBros-v0", "envs.smb:SuperMarioBrosEnv")
