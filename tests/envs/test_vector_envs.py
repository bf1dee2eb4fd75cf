"""Games in this process and in worker processes, behind one interface."""

import pytest
import torch

from envs.workers import LocalEnvs, SubprocEnvs, WorkerLost


class CountingGames:
    """Three agents whose observation is the seed and the step; an episode has as many steps as the seed says."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = 0
        self.finished = torch.zeros(4)
        self.obs = self.view()

    def view(self) -> torch.Tensor:
        return torch.tensor([self.seed, self.clock], dtype=torch.uint8).expand(3, 2)

    def step(self, action: torch.Tensor):
        self.clock += 1
        final_obs = self.view()
        truncated = torch.full((3,), self.clock % self.seed == 0)
        if truncated.any():
            self.clock = 0
            self.finished += torch.tensor([3.0, 1.0, self.seed, 0.0])
        return self.view(), action.float(), torch.zeros_like(truncated), truncated, {"final_obs": final_obs}


def test_workers_play_as_games_in_this_process_do() -> None:
    """Two groups in flight at once; a row of the seeds is a worker."""
    seeds = [[2, 3], [4, 5]]
    envs = SubprocEnvs(CountingGames, seeds, obs_shape=(3, 2))
    local = [[LocalEnvs(CountingGames(seed)) for seed in row] for row in seeds]
    try:
        first_obs = envs.obs.unflatten(0, (2, 2, 3))
        for worker in range(2):
            for group in range(2):
                assert torch.equal(first_obs[group, worker], local[worker][group].obs)
        for step in range(7):
            actions = [torch.arange(6) + 100 * step + 10 * group for group in range(2)]
            for group in range(2):
                envs.send(group, actions[group])
            for group in range(2):
                results = envs.recv(group)
                for worker in range(2):
                    part = slice(3 * worker, 3 * worker + 3)
                    local[worker][group].send(0, actions[group][part])
                    for result, expected in zip(results, local[worker][group].recv(0), strict=True):
                        assert torch.equal(result[part], expected)
        expected = sum(one.read_finished() for row in local for one in row)
        assert torch.equal(envs.read_finished(), expected) and expected[0] > 0
        assert not envs.read_finished().any()
    finally:
        envs.close()
    assert not any(process.is_alive() for process in envs.processes)


def test_a_worker_that_fails_is_named() -> None:
    envs = SubprocEnvs(CountingGames, [[2], [0]], obs_shape=(3, 2))  # no episode has 0 steps
    try:
        envs.send(0, torch.zeros(6, dtype=torch.int64))
        with pytest.raises(WorkerLost, match=r"worker 1 \(process \d+\) failed: ZeroDivisionError"):
            envs.recv(0)
    finally:
        envs.close()
