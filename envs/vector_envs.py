"""Games of many agents behind one interface, in this process or in worker processes.

The agents are in groups that play independently: `send(group, action)` starts a step of one, `recv(group)` gives its
obs, reward, terminated, truncated and final_obs when it is done. `obs` is what all agents see at the start, group by
group; `read_finished()` is how many episodes of agents have ended since the last call, and sums of what
`finished` of the games adds up. Games are called as `MettaBatch` is.
"""

import atexit
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.multiprocessing as mp

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LocalEnvs:
    """Games in this process, one group."""

    num_groups = 1

    def __init__(self, games: Any) -> None:
        self.games = games
        self.obs = games.obs
        self.step = games.step  # a compiled one may take its place
        self.results = None

    def send(self, group: int, action: torch.Tensor) -> None:
        obs, reward, terminated, truncated, info = self.step(action.to(self.obs.device))
        self.results = obs, reward, terminated, truncated, info["final_obs"]

    def recv(self, group: int) -> tuple[torch.Tensor, ...]:
        return self.results

    def read_finished(self) -> torch.Tensor:
        finished = self.games.finished.clone()
        self.games.finished.zero_()
        return finished

    def close(self) -> None:
        pass


class WorkerLost(RuntimeError):
    """A worker has died or does not answer."""


class SubprocEnvs:
    """Games in worker processes, with results and actions in shared memory. Every worker plays a part of each group.

    `make_games(seed)` makes the games of one group in one worker; it has to be picklable. `seeds` has a row for each
    worker and a column for each group, `obs_shape` is (agents, ...) of such games. A worker is told the number of a
    group whose actions are in memory, steps its games of this group, and answers with the number.
    """

    PATIENCE = 10.0  # seconds
    STARTUP_PATIENCE = 120.0  # a worker imports PyTorch first

    def __init__(
        self,
        make_games: Callable[[int], Any],
        seeds: list[list[int]],
        obs_shape: tuple[int, ...],
        pin_memory: bool = False,
    ) -> None:
        num_workers = len(seeds)
        self.num_groups = len(seeds[0])
        num_agents, *token_shape = obs_shape

        def shared(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            tensor = torch.zeros(self.num_groups, num_workers, num_agents, *shape, dtype=dtype).share_memory_()
            if pin_memory:  # so that copies to a GPU wait for nothing
                torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            return tensor

        obs = shared(torch.uint8, *token_shape)
        final_obs = shared(torch.uint8, *token_shape)
        self.results = [obs, shared(torch.float32), shared(torch.bool), shared(torch.bool), final_obs]
        self.action = shared(torch.int64)
        self.finished = torch.zeros(self.num_groups, num_workers, 4).share_memory_()
        self.obs = obs.flatten(0, 2)

        context = mp.get_context("spawn")  # a fork would inherit threads, and CUDA, in no usable state
        self.pipes = []
        self.processes = []
        atexit.register(self.close)  # before multiprocessing would wait for them, whatever ends the program
        # Ctrl-C and SIGTERM reach all processes of a job, and the trainer decides: workers ignore them from birth.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        for worker in range(num_workers):
            pipe, child_pipe = context.Pipe()
            memory = [tensor[:, worker] for tensor in (*self.results, self.action, self.finished)]
            arguments = (make_games, seeds[worker], child_pipe, memory)
            process = context.Process(target=worker_main, args=arguments, daemon=True)
            process.start()
            child_pipe.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            for _ in range(self.num_groups):
                self.wait(self.STARTUP_PATIENCE)
        except BaseException:
            self.close()
            raise

    def wait(self, patience: float) -> None:
        """Until every worker has answered once more."""
        deadline = time.monotonic() + patience
        for number, (pipe, process) in enumerate(zip(self.pipes, self.processes)):
            name = f"worker {number} (process {process.pid})"
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise WorkerLost(f"{name} has not answered for {patience:g} s")
                answer = pipe.recv()
            except (EOFError, ConnectionError):
                process.join(1)
                raise WorkerLost(f"{name} died with exit code {process.exitcode}") from None
            if isinstance(answer, str):
                raise WorkerLost(f"{name} failed: {answer}")

    def send(self, group: int, action: torch.Tensor) -> None:
        self.action[group].view(-1).copy_(action)
        for pipe in self.pipes:
            with suppress(OSError):  # a worker that is gone is named when its answer is missed
                pipe.send(group)

    def recv(self, group: int) -> tuple[torch.Tensor, ...]:
        self.wait(self.PATIENCE)  # groups are answered in the order they were sent in
        return tuple(result[group].flatten(0, 1) for result in self.results)

    def read_finished(self) -> torch.Tensor:
        finished = self.finished.sum((0, 1))
        self.finished.zero_()
        return finished

    def close(self) -> None:
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
            process.join()


def worker_main(make_games: Callable[[int], Any], seeds: list[int], pipe: Any, memory: list[torch.Tensor]) -> None:
    """Body of a worker. It ends when the trainer is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    *shared_results, shared_action, shared_finished = memory
    try:
        groups = [LocalEnvs(make_games(seed)) for seed in seeds]
        for group, envs in enumerate(groups):
            shared_results[0][group] = envs.obs
            pipe.send(group)
        while True:
            group = pipe.recv()
            envs = groups[group]
            envs.send(group, shared_action[group])
            for shared, result in zip(shared_results, envs.recv(group)):
                shared[group] = result
            shared_finished[group] += envs.read_finished()
            pipe.send(group)
    except (EOFError, ConnectionError):  # the trainer is gone
        pass
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        with suppress(OSError):
            pipe.send(f"{type(error).__name__} {reason}")
