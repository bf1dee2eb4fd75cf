"""Copies of the scripts that play CartPole, as benchmarks/pages/own-game.md makes them, and Stable-Baselines3's PPO."""

import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT
from benchmarks.sb3_peers import learning_curve
from envs.gym_batch import GymnasiumBatch

PAGE = (ROOT / "benchmarks/pages/own-game.md").read_text()
DIFFS = {name: ROOT / f"benchmarks/pages/my_{name}.diff" for name in ("ppo", "dqn")}


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
    """[seconds, points] of every evaluation of SB3's PPO with the hyperparameters of the page."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)

    def make_model() -> PPO:
        games = make_vec_env("CartPole-v1", 8, seed=seed)
        return PPO(
            "MlpPolicy",
            games,
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            learning_rate=1e-3,
            gamma=0.98,
            gae_lambda=0.8,
            ent_coef=0,
            seed=seed,
            device="cpu",
        )

    return learning_curve(make_model, mean_points, seconds, every, goal)
