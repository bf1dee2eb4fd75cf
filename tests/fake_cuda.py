"""A CUDA device that is not there: runs a whole script on tensors that claim to be on CUDA, and says what a GPU would.

    python tests/fake_cuda.py report.json script "flags of a run" "flags of the next run"

A `CudaTensor` says that it is on cuda:0 and holds a tensor of the CPU, on which every operation is done. So losses,
games and checkpoints are real, those of the same run on the CPU. On the way the runs are watched:

- a wait is what stops the CPU until the device is done: `.item()`, `nonzero`, a blocking copy, a number put by index;
- during a capture waits are refused, as CUDA does, and copies from memory that is not pinned, and draws from a
  generator that the graph does not know. A graph is a list of operations; a replay does them again in the same memory;
- tensors of different devices in one operation are an error, as on CUDA;
- launches are operations that fill memory of the device, counted by the phases of the script's stopwatch.

It depends on PyTorch's internals: a new release may need a mend here.
"""

import ast
import contextlib
import ctypes
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def load_library() -> None:
    """Build fake_cuda.cpp, once for each version of it and of PyTorch, and load it: before PyTorch, who looks once."""
    source = Path(__file__).with_suffix(".cpp")
    folder = Path(find_spec("torch").origin).parent
    key = hashlib.sha256(source.read_bytes() + f"{version('torch')} {folder}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"fake_cuda_{os.getuid()}_{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(unfinished)]
        command += [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
        command += [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    ctypes.CDLL(str(library))


load_library()

import torch  # noqa: E402
from torch.utils._mode_utils import no_dispatch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

ROOT = Path(__file__).parent.parent
GPU = torch.device("cuda:0")
MAIN_THREAD = threading.get_ident()


class Watch:
    """What is known of the run under way."""

    def __init__(self, loop: range = range(0), entry: str = "") -> None:
        self.loop = loop  # lines of the training loop
        self.entry = entry  # the function that they are in
        self.waits = Counter()  # in the training loop, by place
        self.refused = Counter()  # in captures, by place
        self.phase = Counter()  # launches since the last mark
        self.launches = {}  # by phase of the stopwatch, then by operation
        self.marks = Counter()
        self.graphs = []


WATCH = Watch()
CAPTURE = None  # the graph that is being captured
PINNED = {}  # by address of the memory


# ------------------------------------------------------------------------------------------------- where we are

IN_BETWEEN = {"log", "evaluate_and_log", "save"}  # functions of a script that may wait: what they do is seen by a user


def places() -> list[tuple[str, int, str]]:
    """File, line and function of all frames of this project, the innermost first."""
    if threading.get_ident() == MAIN_THREAD:
        frame = sys._getframe()
    else:  # a thread of autograd works for the main one, which waits for it
        frame = sys._current_frames()[MAIN_THREAD]
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and file != __file__ and "site-packages" not in file:
            found.append((os.path.relpath(file, ROOT), frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def note(counter: Counter, what: str, found: list[tuple[str, int, str]]) -> None:
    path = " < ".join(f"{file}:{line} {function}" for file, line, function in found)
    counter[f"{what} at {path}"] += 1


def wait(what: str) -> None:
    """The CPU would stop here until the device is done."""
    found = places()
    if CAPTURE is not None:
        note(WATCH.refused, what, found)
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    in_loop = any(function == WATCH.entry and line in WATCH.loop for _, line, function in found)
    if in_loop and not any(function in IN_BETWEEN for _, _, function in found):
        note(WATCH.waits, what, found)


def refuse(what: str) -> None:
    """In a capture only."""
    if CAPTURE is not None:
        note(WATCH.refused, what, places())
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


# --------------------------------------------------------------------------------------------------- the tensors


class CudaTensor(torch.Tensor):
    """Says that it is on cuda:0; `inner` is where its numbers are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "CudaTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> "CudaTensor":
        return CudaTensor(self.inner)

    @data.setter
    def data(self, other: "CudaTensor") -> None:
        assert (other.shape, other.dtype, other.stride()) == (self.shape, self.dtype, self.stride())
        self.inner = other.inner

    def __deepcopy__(self, memo: dict) -> "CudaTensor":
        with torch.no_grad():
            copied = CudaTensor(self.inner.clone())
        copied.requires_grad_(self.requires_grad)
        copied._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: int):
        return self.inner.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"CudaTensor({self.inner})"


class Mode(TorchDispatchMode):
    """Sees the operations that have no tensor yet, such as torch.zeros(3, device="cuda")."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


MODE = Mode()
WAITS = "_local_scalar_dense nonzero masked_select equal bincount multinomial _unique2 unique_dim unique_consecutive"
WAITS = {f"aten::{name}" for name in WAITS.split()}
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
COPIES = {"aten::copy_", "aten::_to_copy"}
FREE = "empty empty_strided empty_like new_empty new_empty_strided _unsafe_view lift_fresh lift set_ resize_"
FREE = {f"aten::{name}" for name in FREE.split()}  # fill no memory


def dispatch(func, args: tuple, kwargs: dict) -> Any:
    """One operation of ATen, below autograd and autocast."""
    if func._can_decompose():  # of tensors that autograd does not know; it would have taken it apart
        with MODE:
            return func.decompose(*args, **kwargs)
    name = func._schema.name
    outer = {}  # by id of the tensor inside
    hosts = {}  # tensors of the CPU, by id

    def unwrap(value: Any) -> Any:
        if isinstance(value, CudaTensor):
            outer[id(value.inner)] = value
            return value.inner
        if isinstance(value, torch.Tensor):
            hosts[id(value)] = value
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(unwrap(part) for part in value)
        return value

    inner_args = unwrap(args)
    inner_kwargs = {key: unwrap(value) for key, value in kwargs.items()}
    pin = bool(inner_kwargs.pop("pin_memory", None)) or name == "aten::_pin_memory"
    asked = kwargs.get("device")
    on_gpu = bool(outer) if asked is None else torch.device(asked).type == "cuda"
    if not outer and not on_gpu:
        if name == "aten::_pin_memory":
            result = args[0].clone()
        else:
            result = func(*args, **inner_kwargs)
        if pin:
            PINNED[result.untyped_storage().data_ptr()] = result
        return result

    if asked is not None:
        inner_kwargs["device"] = torch.device("cpu")
    crosses = name in COPIES and (bool(hosts) or not on_gpu)
    if name not in INDEXING and not crosses:
        for host in hosts.values():
            if host.dim() > 0:
                devices = f"at least two devices, cuda:0 and cpu, in {name}"
                raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices}")
    look_at_indices(name, inner_args, outer, hosts)
    if crosses:
        look_at_copy(name, args, kwargs, on_gpu)
    elif name in WAITS or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
        wait(name)
    if torch.Tag.nondeterministic_seeded in func.tags:
        generator = kwargs.get("generator")
        if generator is not None and CAPTURE is not None and generator._cdata not in CAPTURE.generators:
            refuse(f"{name} with a generator that the graph does not know")

    result = func(*inner_args, **inner_kwargs)
    made = []

    def wrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in outer:
                tensor = outer[id(value)]
                if torch.Tag.inplace_view in func.tags:
                    with no_dispatch():
                        func(*args, **kwargs)
                assert tensor.shape == value.shape, f"{name} changes a shape in place"
                return tensor
            if id(value) in hosts or not on_gpu:
                return value
            made.append(value)
            return CudaTensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)(wrap(part) for part in value)
        return value

    to_host = name == "aten::copy_" and id(args[0]) in hosts
    wrapped = wrap(result)
    if on_gpu and not to_host and not func.is_view and name not in FREE and name not in WAITS:
        WATCH.phase[name.removeprefix("aten::")] += 1
        if CAPTURE is not None:
            CAPTURE.tape.append((func, inner_args, inner_kwargs, made))
    return wrapped


def look_at_indices(name: str, args: tuple, outer: dict, hosts: dict) -> None:
    """x[mask] asks how many there are, x[index] = number copies the number from the CPU; x[mask] = number is a fill."""
    if name not in INDEXING:
        return
    indices = [index for index in args[1] if index is not None]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    value = args[2] if len(args) > 2 else None
    value_on_cpu = value is not None and id(value) in hosts
    if value_on_cpu and value.dim() > 0:
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} of values on cpu")
    if any(id(index) in hosts for index in indices):
        wait(f"{name} with an index on the CPU")
    elif masks and not (value_on_cpu and len(indices) == 1):
        wait(f"{name} with a mask")
    elif value_on_cpu and not masks:
        wait(f"{name} of a number from the CPU")


def look_at_copy(name: str, args: tuple, kwargs: dict, to_gpu: bool) -> None:
    """Between devices. Only a copy with `non_blocking` from or to pinned memory waits for nothing."""
    if name == "aten::copy_":
        target, source = args[:2]
        to_gpu = isinstance(target, CudaTensor)
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        host = source if to_gpu else target
        pinned = host.untyped_storage().data_ptr() in PINNED
    else:
        non_blocking = kwargs.get("non_blocking", False)
        pinned = True  # what `to("cpu", non_blocking=True)` makes is
        if to_gpu:
            pinned = args[0].untyped_storage().data_ptr() in PINNED
    direction = "to the device" if to_gpu else "to the CPU"
    if not non_blocking or not (pinned or to_gpu):
        wait(f"{name} {direction}")
    elif not pinned:
        refuse(f"{name} {direction} from memory that is not pinned")


# ------------------------------------------------------------------------------------------------- torch.cuda


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = None

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.time - self.time)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("Event.synchronize")

    def wait(self, stream: Any = None) -> None:
        pass


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("Stream.synchronize")


class CUDAGraph:
    """What is captured is done as well; so the first replay, which a real graph would need for that, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tape = []
        self.generators = set()
        self.has_run = False
        WATCH.graphs.append(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.add(generator._cdata)

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def reset(self) -> None:
        self.tape.clear()

    def replay(self) -> None:
        WATCH.phase["replay"] += 1
        if not self.has_run:
            self.has_run = True
            return
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, made in self.tape:
                again = func(*args, **kwargs)
                if made:
                    again = [again] if isinstance(again, torch.Tensor) else again
                    new = [tensor for tensor in again if isinstance(tensor, torch.Tensor)]
                    for old, tensor in zip(made, new, strict=True):
                        old.copy_(tensor)


@contextlib.contextmanager
def capture(graph: CUDAGraph, *args: Any, **kwargs: Any):
    global CAPTURE
    before, WATCH.phase = WATCH.phase, Counter()  # a capture launches nothing
    CAPTURE = graph
    try:
        yield
    finally:
        CAPTURE, WATCH.phase = None, before


def pin(address: int, size: int, flags: int) -> None:
    PINNED[address] = size


def install() -> None:
    """Put a GPU into torch.cuda."""
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.backends.cuda.is_built = lambda: True
    gib = 2**30
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "a GPU that is not there",
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (80 * gib, 80 * gib),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "utilization": lambda device=None: 0,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: CAPTURE is not None,
        "synchronize": lambda device=None: wait("torch.cuda.synchronize"),
        "manual_seed_all": lambda seed: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=pin),
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "_lazy_init": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": capture,
    }.items():
        setattr(torch.cuda, name, value)


# ------------------------------------------------------------------------------------------------------ the run


def training_loop(script: ModuleType) -> tuple[str, range]:
    """The function that the training loop is in, and its lines."""
    for function in ast.parse(inspect.getsource(script)).body:
        if isinstance(function, ast.FunctionDef) and function.name in ("main", "run"):
            for node in ast.walk(function):
                if isinstance(node, ast.While) and "progress()" in ast.unparse(node.test):
                    return function.name, range(node.lineno, node.end_lineno + 1)
    raise ValueError(f"{script.__name__}: no training loop")


def watch_phases(script: ModuleType) -> None:
    """Launches belong to the phase whose mark comes next. In a capture nobody marks."""
    mark = script.PhaseTimer.lap

    def counting_mark(self: Any, phase: str = "") -> None:
        mark(self, phase)
        if CAPTURE is None:
            WATCH.launches.setdefault(phase, Counter()).update(WATCH.phase)
            WATCH.marks[phase] += 1
            WATCH.phase.clear()

    script.PhaseTimer.lap = counting_mark


def shorten(script: ModuleType) -> None:
    """Episodes of the arena are as long as its rules say, and a GIF has many frames."""
    importlib.import_module("envs.playing").MAX_GIF_FRAMES = 3
    if script.__name__ == "ppo_metta":
        for rules in script.VARIANTS.values():
            rules["max_steps"] = 16


def run(script: ModuleType, flags: list[str]) -> dict[str, Any]:
    """One run; what was seen of it."""
    global WATCH
    entry, loop = training_loop(script)
    WATCH = Watch(loop, entry)
    sys.argv = [f"{script.__name__}.py", *flags]
    args = script.parse_args()
    with MODE:
        summary = script.main(args)
    return {
        "waits": WATCH.waits,
        "refused": WATCH.refused,
        "launches": WATCH.launches,
        "marks": WATCH.marks,
        "graphs": [len(graph.tape) for graph in WATCH.graphs],
        "summary": summary,
    }


def main() -> None:
    report, name, *runs = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    install()
    script = importlib.import_module(name)
    watch_phases(script)
    shorten(script)
    seen = [run(script, flags.split()) for flags in runs]
    Path(report).write_text(json.dumps(seen, indent=1, default=str))


if __name__ == "__main__":
    main()
