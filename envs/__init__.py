"""Games as Gymnasium environments. Importing this registers their ids and does nothing else."""

from gymnasium.envs.registration import register

from envs import metta_rules, snake

for _id, _rules in snake.VARIANTS.items():
    register(_id, "envs.snake:SnakeEnv", vector_entry_point="envs.gym_vector:SnakeVectorEnv", kwargs=_rules)
for _id, _rules in metta_rules.VARIANTS.items():
    register(_id, vector_entry_point="envs.gym_vector:MettaVectorEnv", kwargs=_rules)
register("MarioLike-v0", "envs.mario_batch:MarioEnv", vector_entry_point="envs.gym_vector:MarioVectorEnv")
register("SuperMarioBros-v0", "envs.smb:SuperMarioBrosEnv")
