"""CartPole: copies of scripts, as benchmarks/pages/own-game.md makes them, and Stable-Baselines3's agents."""

import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT
from benchmarks.sb3_compat import TUNED
from benchmarks.sb3_peers import FOREVER, learning_curve, sb3_agent
from envs.gym_batch import GymnasiumBatch

PAGE = (ROOT / "benchmarks/pages/own-game.md").read_text()
DIFFS = {name: ROOT / f"benchmarks/pages/my_{name}.diff" for name in ("ppo", "dqn")}

SB3_AGENTS = {
    "SB3's PPO": {
        "name": "SB3's PPO, defaults",
        "num_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "learning_rate": 1e-3,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "ent_coef": 0,
    },
    "SB3's DQN": {"name": "SB3's DQN, defaults", **TUNED, "exploration_fraction": 8000 / FOREVER},
}


def copied_script(name: str, folder: str | Path) -> str:
    """Path of my_`name`.py in `folder`."""
    original = ROOT / f"{name}_snake.py"
    script = Path(folder, f"my_{name}.py")
    script.write_text(original.read_text())
    subprocess.run(["git", "apply", DIFFS[name]], cwd=folder, check=True)
    return str(script)


def page_flags(name: str, env_id: str = "CartPole-v1") -> str:
    """Flags of the page's command of my_`name`.py for that game."""
    page = PAGE.replace("\\\n", " ")
    command = rf"python my_{name}\.py (--env-id {env_id} .*)"
    flags = re.search(command, page)[1]
    return " ".join(flags.split())


def mean_points(model: Any) -> float:
    """Of 20 greedy games of an SB3 agent."""
    games = GymnasiumBatch("CartPole-v1", 20, seed=10_000)
    obs = games.reset()
    score = torch.zeros(20)
    playing = torch.ones(20, dtype=torch.bool)
    while playing.any():
        action, _ = model.predict(obs.numpy(), deterministic=True)
        action = torch.as_tensor(action)
        obs, _, terminated, truncated, info = games.step(action)
        first_end = playing & (terminated | truncated)
        score[first_end] = info["score"][first_end]
        playing &= ~first_end
    return score.mean().item()


def sb3_cartpole_curve(name: str, seed: int, seconds: float, every: float, goal: float) -> list:
    """[seconds, points] of every evaluation of an agent of SB3_AGENTS."""

    def make_model() -> Any:
        return sb3_agent(device="cpu", threads=1, env_id="CartPole-v1", seed=seed, **SB3_AGENTS[name])

    return learning_curve(make_model, mean_points, seconds, every, goal)
