"""Games as Gymnasium environments. Importing this registers their ids and does nothing else."""

from gymnasium.envs.registration import register

from envs import metta, snake

for _id, _rules in snake.VARIANTS.items():
    register(_id, "envs.snake:SnakeEnv", vector_entry_point="envs.snake_batch:SnakeVectorEnv", kwargs=_rules)
for _id, _rules in metta.VARIANTS.items():
    register(_id, vector_entry_point="envs.metta:MettaVectorEnv", kwargs=_rules)
register("MarioLike-v0", "envs.mario_batch:MarioEnv", vector_entry_point="envs.mario_batch:MarioVectorEnv")
register("SuperMarioBros-v0", "envs.smb:SuperMarioBrosEnv")
