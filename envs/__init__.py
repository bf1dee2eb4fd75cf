"""Games as Gymnasium environments. Importing this package registers their ids."""

from gymnasium.envs.registration import register

from envs.metta.rules import VARIANTS as METTA_VARIANTS
from envs.snake.rules import VARIANTS as SNAKE_VARIANTS

for _id, _rules in SNAKE_VARIANTS.items():
    register(_id, "envs.snake.rules:SnakeEnv", vector_entry_point="envs.snake.gym:SnakeVectorEnv", kwargs=_rules)
for _id, _rules in METTA_VARIANTS.items():
    register(_id, vector_entry_point="envs.metta.gym:MettaVectorEnv", kwargs=_rules)
register(
    "MarioLike-v0",
    "envs.mario.batch:MarioEnv",
    vector_entry_point="envs.mario.gym:MarioVectorEnv",
)
register("SuperMarioBros-v0", "envs.mario.real:SuperMarioBrosEnv")
