"""CUDA graphs without a GPU: which operations a capture refuses, and what a replay computes.

`install` puts a substitute for `torch` into a script and its games. There, `torch.device("cuda")` is a device whose
type reads "cuda" and whose tensors are on the CPU: `main` itself chooses CUDA, and no part of the script is replaced.
`torch.cuda.CUDAGraph` is a tape:

- A capture runs the function under a `TorchDispatchMode`, which sees every operation below autograd and autocast. An
  operation that would wait for the device or copy from the host raises `Refused` with the line of the script. One that
  writes or makes a tensor is recorded on the tape. At the end all memory and random numbers are restored, because a
  capture has no effect, and memory that it made is filled with garbage.
- A replay runs the recorded operations again, on the same memory, with the Python numbers of the capture.

So a frozen number or a replaced tensor makes a run with --cudagraph differ from a run without it.

Not seen: tensors on different devices (all are on the CPU), the precision of a GPU's kernels (autocast casts what it
casts on a CPU), streams that race.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

WAITS = "_local_scalar_dense nonzero masked_select repeat_interleave bincount equal".split()
WAITS += "_unique _unique2 unique_dim unique_consecutive".split()
INDEXED = "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split()
UNINITIALISED = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()  # no kernel
GARBAGE = 0x7F  # as a byte; a huge number as a float, and no index of anything


class Refused(AssertionError):
    """A real capture would fail here. No RuntimeError, so that a script does not go on without its graph."""


class Device(str):
    """`torch.device` for the script: its type is what was asked for, and PyTorch reads the string "cpu"."""

    type: str

    def __new__(cls, name: Any) -> "Device":
        device = super().__new__(cls, "cpu")
        device.type = getattr(name, "type", name).split(":")[0]
        return device

    def __enter__(self) -> None:
        pass  # tensors lie on the CPU as it is

    def __exit__(self, *_: Any) -> None:
        pass


class Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
        super().__init__("cpu", *args, **options)


class GradScaler(torch.amp.GradScaler):
    """It begins with so large a scale that the first updates overflow: replays have to skip some, too."""

    def __init__(self, device_type: str, **options: Any) -> None:
        super().__init__("cpu", init_scale=2.0**26, **options)


class Generator(torch.Generator):
    def graphsafe_set_state(self, state: torch.Generator) -> None:
        pass  # a tape never holds on to a state


class Stream:
    def wait_stream(self, stream: "Stream") -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.seconds - self.seconds)


def storage_of(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage]:
    """A key that all views of the same memory share, and that memory. Who keeps the key must keep the memory too."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


@cache
def written_arguments(operation: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Place and name of the arguments that the operation writes to."""
    arguments = enumerate(operation._schema.arguments)
    return [(n, argument.name) for n, argument in arguments if argument.alias_info and argument.alias_info.is_write]


class Recorder(TorchDispatchMode):
    """A capture: operations are recorded on `tape` while it is active, and `undo` reverts them."""

    def __init__(self, generators: list[torch.Generator], refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self.refuse = refuse
        self.random_states = [(generator, generator.get_state()) for generator in generators]
        # In an operation a generator is another object than in the script; their seeds tell which it is.
        self.seeds = {generator.initial_seed() for generator in generators}
        self.tape: list[tuple] = []  # operation, its arguments, the tensors that it makes, whether gradients are on
        self.contents: dict[int, tuple] = {}  # memory that was written to, and a copy of what it held before
        self.made: dict[int, torch.UntypedStorage] = {}  # memory of this capture
        self.from_host: dict[int, torch.UntypedStorage] = {}  # Python numbers, as tensors

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = operation._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        inputs = {storage_of(leaf)[0] for leaf in leaves if isinstance(leaf, torch.Tensor)}
        problem = self.problem(name, args, leaves, inputs)
        if problem is not None:
            self.refuse(f"{problem} ({operation})")

        written = [kwargs.get(key, args[n] if n < len(args) else None) for n, key in written_arguments(operation)]
        written = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
        for key, storage in map(storage_of, written):
            if key not in self.made and key not in self.contents:
                self.contents[key] = storage, storage.clone()

        result = operation(*args, **kwargs)
        if name == "lift_fresh":  # makes a tensor of Python numbers
            self.from_host |= [storage_of(result)]
            return result
        new = []  # what the operation makes, None for views of its arguments
        for leaf in tree_leaves(result):
            is_new = isinstance(leaf, torch.Tensor) and storage_of(leaf)[0] not in inputs
            new.append(leaf.detach() if is_new else None)
        made = [storage_of(tensor) for tensor in new if tensor is not None]
        self.made |= made
        if (made or written) and name not in UNINITIALISED:
            # Detached, they keep memory, shape and strides of now, whatever becomes of the tensors.
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            self.tape.append((operation, args, kwargs, new, torch.is_grad_enabled()))
        return result

    def problem(self, name: str, args: tuple, leaves: list, inputs: set[int]) -> str | None:
        """Why a capture refuses this operation; None if it does not."""
        if name in WAITS:
            return "waits for the device"
        if name in INDEXED and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            return "waits for the device: a mask as an index"
        if name != "fill_" and inputs & self.from_host.keys():  # a number to fill with is no copy
            return "copies a number from the host"
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf.initial_seed() not in self.seeds:
                return "draws from a generator that is not registered with the graph"
        return None

    def undo(self) -> None:
        for storage, content in self.contents.values():
            storage.copy_(content)
        for storage in self.made.values():
            storage.fill_(GARBAGE)
        for generator, state in self.random_states:
            generator.set_state(state)


class CUDAGraph:
    def __init__(self) -> None:
        self.generators = [torch.default_generator]
        self.tape: list[tuple] = []
        self.replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for operation, args, kwargs, new, gradients in self.tape:
                with torch.set_grad_enabled(gradients):  # some operations choose their kernel by it
                    result = operation(*args, **kwargs)
                for tensor, value in zip(new, tree_leaves(result)):
                    if tensor is not None:
                        tensor.copy_(value)


class Cuda:
    """`torch.cuda` for the script. `graphs` are those that were captured."""

    CUDAGraph, Stream, Event = CUDAGraph, Stream, Event

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules
        self.graphs: list[CUDAGraph] = []
        self.recorder: Recorder | None = None
        self.is_available = lambda: True
        self.is_bf16_supported = lambda including_emulation=True: True
        self.is_current_stream_capturing = lambda: self.recorder is not None
        self.get_device_name = lambda device: "a tape"
        self.mem_get_info = lambda device: (2**36, 2**36)
        self.memory_allocated = self.max_memory_allocated = self.utilization = lambda device: 0
        self.current_stream = Stream
        self.current_device = lambda: 0
        self.default_generators = [Generator()]
        self.stream = lambda stream: nullcontext()
        self.synchronize = self.host_only("synchronize", lambda: None)

    @contextmanager
    def graph(self, graph: CUDAGraph, **options: Any) -> Iterator[None]:
        self.recorder = Recorder(graph.generators, self.refuse)
        try:
            with self.recorder:
                yield
            graph.tape = self.recorder.tape
            self.graphs.append(graph)
        finally:
            self.recorder.undo()
            self.recorder = None

    def refuse(self, problem: str) -> NoReturn:
        """With the line of the script, or of its games, that is being run."""
        frame = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__") not in self.modules:
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "?"
        raise Refused(f"{line}: {problem}")

    def host_only(self, name: str, function: Callable) -> Callable:
        """`function`, refused in a capture: it is no operation that the recorder would see."""

        def refusing(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is not None:
                self.refuse(f"waits for the device ({name})")
            return function(*args, **kwargs)

        return refusing

    def optimizer(self, kind: type) -> type:
        """In a capture it must have been made capturable, as on CUDA; but on a CPU none can be."""

        class Optimizer(kind):
            def __init__(optimizer, *args: Any, capturable: bool = False, **options: Any) -> None:
                super().__init__(*args, **options)
                optimizer.capturable = capturable

            def step(optimizer) -> None:
                if self.recorder is not None and not optimizer.capturable:
                    self.refuse(f"{kind.__name__} is not capturable")
                super().step()

        return Optimizer


class Torch:
    """`torch` for the script."""

    device, autocast, amp = Device, Autocast, SimpleNamespace(GradScaler=GradScaler)
    Generator = Generator

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        adam, adamw = cuda.optimizer(torch.optim.Adam), cuda.optimizer(torch.optim.AdamW)
        self.optim = SimpleNamespace(Adam=adam, AdamW=adamw)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)  # memory of a CPU without a GPU cannot be pinned

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Cuda:
    """Give these modules, a script and its games, a `torch` with CUDA, and show them all tensors as lying there."""
    names = {module.__name__ for module in modules}
    cuda = Cuda(names)
    for module in modules:
        monkeypatch.setattr(module, "torch", Torch(cuda))

    def shown_as(shown: Any, real: Any) -> property:
        """An attribute of tensors that is `shown` to these modules, and `real` to all others."""

        def read(tensor: torch.Tensor) -> Any:
            return shown if sys._getframe(1).f_globals.get("__name__") in names else real.__get__(tensor)

        return property(read)

    monkeypatch.setattr(torch.Tensor, "device", shown_as(Device("cuda"), torch.Tensor.device))
    monkeypatch.setattr(torch.Tensor, "is_cuda", shown_as(True, torch.Tensor.is_cuda))
    # PyTorch's own layers ask without a device, and mean CUDA: here that is the CPU's autocast.
    autocast_is_on = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": autocast_is_on(device))
    for name in ("cpu", "numpy", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, cuda.host_only(name, getattr(torch.Tensor, name)))
    return cuda
