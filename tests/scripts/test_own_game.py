"""benchmarks/pages/my_*.diff, applied to copies of the scripts: they learn another game."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_runs import ROOT

from benchmarks.own_game import DIFFS, copied_script, page_flags
from envs.gym_batch import GymnasiumBatch

GAMES = [("ppo", "CartPole-v1", 450), ("dqn", "CartPole-v1", 450), ("ppo", "LunarLander-v3", 200)]


@pytest.mark.slow
@pytest.mark.parametrize("name, env_id, score", GAMES)
def test_a_copy_with_the_diff_of_the_page_learns(tmp_path, name, env_id, score) -> None:
    """An evaluation of the run reaches the score; the last policy of the short DQN run may be worse."""
    if env_id == "LunarLander-v3":
        pytest.importorskip("Box2D")
    assert DIFFS[name].read_text().count("\n+") <= 41  # with the line of the file's name
    flags = f"{page_flags(name, env_id)} --threads 1 --eval-every 1 --log-every 1 --eval-episodes 200"
    command = [sys.executable, copied_script(name, tmp_path), *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert max(map(float, re.findall(r"(?:greedy|eval_score_mean) +([-\d.]+)", done.stdout))) >= score


def test_gymnasium_games_in_a_batch_follow_the_single_game() -> None:
    """Rewards, ends, final observations, scores and counts, with restarts within the step."""
    import gymnasium

    batch = GymnasiumBatch("CartPole-v1", 3, seed=5)
    obs = batch.reset()
    envs = [gymnasium.make("CartPole-v1") for _ in range(3)]
    starts = [env.reset(seed=5 + lane)[0] for lane, env in enumerate(envs)]
    np.testing.assert_array_equal(obs, starts)
    scores = [0.0] * 3
    finished = np.zeros(4)
    rng = np.random.default_rng(0)
    for _ in range(100):
        action = torch.as_tensor(rng.integers(2, size=3))
        obs, reward, terminated, truncated, info = batch.step(action)
        for lane, env in enumerate(envs):
            final, one_reward, end, cut, _ = env.step(action[lane].item())
            scores[lane] += one_reward
            assert (reward[lane], terminated[lane], truncated[lane]) == (one_reward, end, cut)
            assert info["score"][lane] == scores[lane]
            np.testing.assert_array_equal(info["final_obs"][lane], final)
            if end or cut:
                finished += [1, scores[lane], scores[lane], scores[lane]]
                scores[lane] = 0.0
                final = env.reset()[0]
            np.testing.assert_array_equal(obs[lane], final)
    assert finished[0] > 5
    np.testing.assert_array_equal(batch.finished, finished)
