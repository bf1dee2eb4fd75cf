"""Processes with shared memory: collectors that fill ring buffers (dqn_mario_async.py), and workers (ppo_metta.py).

Rings and broadcasts are lock-free. A writer first writes the payload, then one aligned 8-byte index, so that a reader
sees a complete payload or none, even if the writer is killed in between.
"""

import atexit
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

# Not fork: the child would inherit threads and CUDA in an unusable state.
SPAWN = torch.multiprocessing.get_context("spawn")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ORDERED = platform.machine() in ("x86_64", "AMD64")  # other cores see stores in program order
THREADS = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape by name


def shared_zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros in shared memory. Its name is already removed from /dev/shm, so that nothing is left after a crash.

    Raises OSError if there is not enough shared memory.
    """
    tensor = torch.zeros(shape, dtype=dtype)
    try:
        return tensor.share_memory_()
    except RuntimeError as error:
        for file in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):  # PyTorch leaves the file after a failure
            file.unlink()
        raise OSError(f"shared memory: {error}; a smaller --ring-blocks or a larger /dev/shm works") from None


class Fence:
    """A lock used as a memory barrier, on processors that reorder stores. It does not protect data.

    So if its holder was killed, another process can continue after a timeout of one second and release it.
    """

    def __init__(self) -> None:
        self.lock = SPAWN.Lock()

    def __enter__(self) -> None:
        self.lock.acquire(timeout=1)

    def __exit__(self, *_: Any) -> None:
        with suppress(ValueError):  # already released by a process after its timeout
            self.lock.release()


def make_fence() -> Any:
    return nullcontext() if ORDERED else Fence()


class Ring:
    """A ring buffer in shared memory: one process pushes blocks of `fields`, another one reads them.

    The reader writes `tail`. The writer writes `head` and `steps`, the number of blocks it has made, pushed or not.
    """

    def __init__(self, num_blocks: int, fields: Fields) -> None:
        self.num_blocks = num_blocks
        self.fields = {name: shared_zeros(dtype, num_blocks, *shape) for name, (dtype, shape) in fields.items()}
        self.head = shared_zeros(torch.int64, 1)
        self.tail = shared_zeros(torch.int64, 1)
        self.steps = shared_zeros(torch.int64, 1)
        self.fence = make_fence()

    def push(self, block: dict[str, Any]) -> bool:
        """Writes a block. Returns False if the ring is full."""
        head = self.head.item()
        with self.fence:
            if head - self.tail.item() == self.num_blocks:
                return False
        for name, value in block.items():
            self.fields[name].numpy()[head % self.num_blocks] = value
        with self.fence:
            self.head.numpy()[0] = head + 1
        return True

    def read(self) -> dict[str, torch.Tensor]:
        """Views of the blocks in the ring, (blocks, ...), up to the end of the buffer. Copy them, then `release`."""
        tail = self.tail.item()
        first = tail % self.num_blocks
        with self.fence:
            count = min(self.head.item() - tail, self.num_blocks - first)
        return {name: field[first : first + count] for name, field in self.fields.items()}

    def release(self, count: int) -> None:
        """Frees the first `count` blocks."""
        with self.fence:
            self.tail.numpy()[0] += count


def to_device(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """CPU tensors on `device`, in one asynchronous copy. On CPU they are returned unchanged.

    The copy is from pinned memory, which PyTorch does not reuse before the copy is finished.
    """
    if device.type == "cpu":
        return tensors
    sizes = [math.ceil(tensor.nbytes / 16) * 16 for tensor in tensors.values()]  # aligned for every dtype

    def unpack(packed: torch.Tensor) -> dict[str, torch.Tensor]:
        unpacked = {}
        for (name, tensor), part in zip(tensors.items(), packed.split(sizes)):
            unpacked[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return unpacked

    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for name, part in unpack(packed).items():
        part.copy_(tensors[name])
    return unpack(packed.to(device, non_blocking=True))


class Broadcast:
    """Messages from the learner to all collectors: weights, progress of the run, and when to stop.

    Weights are double-buffered. New ones go to the slot that is not current, then the version increases. A reader
    copies again if the version has changed during its copy, because the slot may have been overwritten.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self.slots = shared_zeros(torch.float32, 2, len(weights))
        self.updates = shared_zeros(torch.int64, 2)
        self.version = shared_zeros(torch.int64, 1)
        self.progress = shared_zeros(torch.float64, 1)
        self.stop = shared_zeros(torch.int64, 1)
        self.fence = make_fence()
        self.learner = os.getpid()

    def is_over(self) -> bool:
        """Whether to stop: on request, or because the learner has died."""
        return bool(self.stop) or self.learner not in (os.getpid(), os.getppid())

    def publish(self, weights: torch.Tensor, updates: int) -> None:
        version = self.version.item() + 1
        self.slots[version % 2].copy_(weights)
        self.updates.numpy()[version % 2] = updates
        with self.fence:
            self.version.numpy()[0] = version

    def fetch(self, weights: torch.Tensor) -> tuple[int, int]:
        """Copies the newest weights to `weights`. Returns their version and the number of updates before them."""
        while True:
            with self.fence:
                version = self.version.item()
            weights.copy_(self.slots[version % 2])
            updates = self.updates[version % 2].item()
            with self.fence:
                if self.version.item() == version:
                    return version, updates


class Publisher:
    """Broadcasts the learner's weights. With `asynchronous` (CUDA) it does so without waiting for the GPU.

    At most one copy is pending, so the CPU runs ahead of the GPU by at most two broadcasts.
    """

    def __init__(self, broadcast: Broadcast, asynchronous: bool) -> None:
        self.broadcast = broadcast
        self.copy_event = torch.cuda.Event() if asynchronous else None
        self.weights = None  # the pending copy
        self.updates = 0  # number of updates at the time of that copy

    def publish(self, weights: torch.Tensor, updates: int) -> None:
        if self.copy_event is None:
            self.broadcast.publish(weights, updates)
            return
        if self.weights is not None:
            self.copy_event.synchronize()  # sync: the GPU is behind by more than one broadcast
            self.poll()
        self.weights = weights.to("cpu", non_blocking=True)  # into pinned memory
        self.updates = updates
        self.copy_event.record()

    def poll(self) -> None:
        """Broadcasts the pending copy if it is finished."""
        if self.weights is not None and self.copy_event.query():
            self.broadcast.publish(self.weights, self.updates)
            self.weights = None


@contextmanager
def worker_environment() -> Iterator[None]:
    """Environment for starting processes; this process gets its own back at the end.

    Processes started inside use one thread per library, and SIGINT and SIGTERM are blocked in them. These signals reach
    the whole process group, and the learner tells the other processes when to stop.
    """
    environment = {name: os.environ.get(name) for name in THREADS}
    mask = None
    try:
        os.environ.update(dict.fromkeys(THREADS, "1"))
        if hasattr(signal, "pthread_sigmask"):  # not on Windows, where `collector_main` ignores them
            resource_tracker.ensure_running()  # starting it unblocks signals
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in environment.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class Collectors:
    """Processes that each call `step()` of their `make_collector(number, start, ring, broadcast)` in a loop.

    Each has its own ring and is replaced if it dies. `start` counts all processes started so far, so that a replacement
    does not repeat games.
    """

    def __init__(self, make_collector: Callable, rings: list[Ring], broadcast: Broadcast) -> None:
        self.make_collector = make_collector
        self.rings = rings
        self.broadcast = broadcast
        self.processes = []
        self.starts = 0
        self.failed_starts = 0  # in a row
        self.head_at_start = [0] * len(rings)
        self.next_check = 0.0

    def start(self, signals: list[int]) -> None:
        """Starts all processes and waits until each has pushed a block, or until `signals` is not empty."""
        for number in range(len(self.rings)):
            self.processes.append(self.start_process(number))
        while not signals and not all(ring.head for ring in self.rings):
            time.sleep(0.01)
            self.restart_dead()

    def start_process(self, number: int) -> Any:
        ring = self.rings[number]
        self.head_at_start[number] = ring.head.item()
        arguments = (self.make_collector, number, self.starts, ring, self.broadcast)
        process = SPAWN.Process(target=collector_main, args=arguments, daemon=True)
        self.starts += 1
        with worker_environment():
            process.start()
        return process

    def restart_dead(self) -> None:
        """Replaces dead processes, at most once a second. The blocks in their rings are kept.

        Raises ChildProcessError if three in a row died before they pushed a block.
        """
        if time.monotonic() < self.next_check:
            return
        self.next_check = time.monotonic() + 1
        for number, process in enumerate(self.processes):
            if process.exitcode is None:
                continue
            print(f"collector {number} ended with exit code {process.exitcode} and is replaced", file=sys.stderr)
            self.failed_starts += 1
            if self.rings[number].head.item() > self.head_at_start[number]:
                self.failed_starts = 0
            if self.failed_starts == 3:
                raise ChildProcessError("three collectors in a row ended before they played, see above")
            self.processes[number] = self.start_process(number)

    def stop(self) -> None:
        """Asks the processes to stop, and kills those that have not done so after two seconds."""
        self.broadcast.stop.fill_(1)
        deadline = time.monotonic() + 2
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()


def collector_main(make_collector: Callable, number: int, start: int, ring: Ring, broadcast: Broadcast) -> None:
    """Main function of a collector process."""
    for signal_number in SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        collector = make_collector(number, start, ring, broadcast)
        while not broadcast.is_over():
            collector.step()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        print(f"collector {number}: {type(error).__name__} ({reason})", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


# -------------------------------------------------------------------------------------------- games in worker processes


class LocalEnvs:
    """Games in this process, as one group, with the interface of `SubprocEnvs`."""

    num_groups = 1

    def __init__(self, games: Any) -> None:
        self.games = games
        self.obs = games.obs
        self.step = games.step  # the caller may replace it by a compiled function
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


class WorkerLost(ChildProcessError):
    """A worker has died, failed, or does not answer."""


class SubprocEnvs:
    """Games in worker processes, with results and actions in shared memory.

    The games are divided into groups, and each worker has a part of every group: while the workers step one group, the
    caller can compute actions for another. `make_games(seed)` makes one worker's part of a group and must be picklable.
    `seeds` has a row per worker and a column per group; `obs_shape` is (agents, ...) of such a part.

    `send(group, action)` starts a step. `recv(group)` waits for its end and returns obs, reward, terminated, truncated
    and final_obs of all agents of the group; it raises WorkerLost if a worker does not answer.
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
            if pin_memory:  # for asynchronous copies to a GPU
                torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            return tensor

        obs = shared(torch.uint8, *token_shape)
        final_obs = shared(torch.uint8, *token_shape)
        self.results = [obs, shared(torch.float32), shared(torch.bool), shared(torch.bool), final_obs]
        self.action = shared(torch.int64)
        self.finished = torch.zeros(self.num_groups, num_workers, 4).share_memory_()
        self.obs = obs.flatten(0, 2)

        self.pipes = []
        self.processes = []
        atexit.register(self.close)  # runs before multiprocessing would wait for the workers
        # SIGINT and SIGTERM reach all processes of a job. Workers ignore them from their start: the trainer decides.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        for worker in range(num_workers):
            pipe, child_pipe = SPAWN.Pipe()
            memory = [tensor[:, worker] for tensor in (*self.results, self.action, self.finished)]
            arguments = (make_games, seeds[worker], child_pipe, memory)
            process = SPAWN.Process(target=worker_main, args=arguments, daemon=True)
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
        """Waits for one answer of every worker. Raises WorkerLost after `patience` seconds."""
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
            with suppress(OSError):  # `recv` reports a dead worker
                pipe.send(group)

    def recv(self, group: int) -> tuple[torch.Tensor, ...]:
        self.wait(self.PATIENCE)  # answers arrive in the order in which groups were sent
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
    """Main function of a worker process. It returns when the trainer is gone."""
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
