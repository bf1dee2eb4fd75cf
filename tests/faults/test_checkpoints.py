"""Checkpoints that are damaged at random: refused in one line, or loaded, with nothing in them executed."""

import io
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow


def flip_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 2, 10, 1000])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def insert_bytes(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + draw.randbytes(draw.choice([1, 16, 5000])) + data[place:]


def change_member(data: bytes, draw: random.Random) -> bytes:
    """Of the zip that a checkpoint is: one is gone, empty, or has other bytes."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(result, "w") as after:
        victim = draw.choice(before.namelist())
        how = draw.choice(["gone", "empty", "flipped", "twice"])
        for name in before.namelist():
            member = before.read(name)
            if name == victim:
                if how == "gone":
                    continue
                if how == "empty":
                    member = b""
                if how == "flipped" and member:
                    member = flip_bytes(member, draw)
                if how == "twice":
                    after.writestr(f"{name}2", member)
            after.writestr(name, member)
    return result.getvalue()


class Executed:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def other_values(tensor: torch.Tensor) -> list[Any]:
    """What may replace a tensor."""
    values = [tensor.double(), tensor.bool(), tensor.flatten()[:-1], tensor[None], tensor.new_zeros(0), None, "text"]
    values += [{}, [], tensor.tolist() if tensor.numel() < 100 else 0, tensor.clone().to_sparse()]
    values += [torch.full_like(tensor, 127), torch.zeros_like(tensor), torch.empty(tensor.shape, device="meta")]
    if tensor.is_floating_point():
        values += [torch.full_like(tensor, value) for value in (float("nan"), float("inf"), 1e30)]
        values.append(torch.quantize_per_tensor(tensor.float().flatten(), 0.1, 0, torch.qint8))
    else:
        values += [torch.full_like(tensor, torch.iinfo(tensor.dtype).max)] if tensor.dtype != torch.bool else []
    if tensor.dim():
        indices = torch.tensor([[10**6]] * tensor.dim())
        values.append(torch.sparse_coo_tensor(indices, torch.ones(1), tensor.shape, check_invariants=False))
    return values


def other_numbers(number: Any) -> list[Any]:
    return [
        -1,
        2**63,
        2**100,
        1e308,
        float("nan"),
        float("inf"),
        "1",
        None,
        [],
        {},
        True,
        torch.zeros(3),
        b"1",
        -number,
    ]


def change_value(data: bytes, draw: random.Random) -> bytes:
    """Another dtype, shape, layout or content of one part, or a part that is missing."""
    checkpoint = torch.load(io.BytesIO(data), weights_only=True)
    part, key = checkpoint, draw.choice(list(checkpoint))
    while isinstance(part[key], dict) and part[key] and draw.random() < 0.95:
        part = part[key]
        key = draw.choice(list(part))
    value = part[key]
    how = draw.choice(["other", "other", "other", "gone", "renamed", "foreign"])
    if how == "gone":
        del part[key]
    elif how == "renamed":
        part[f"{key}_"] = part.pop(key)
    elif how == "foreign":
        part[key] = draw.choice([Executed(), Path("/"), print, torch.nn.Linear(2, 2), {1, 2}, 1j])
    elif isinstance(value, torch.Tensor):
        part[key] = draw.choice(other_values(value))
    elif type(value) in (int, float):
        part[key] = draw.choice(other_numbers(value))
    else:
        part[key] = draw.choice([None, 0, "text", [], {}, "x" * 10**5, "\0", Executed()])
    result = io.BytesIO()
    torch.save(checkpoint, result)
    return result.getvalue()


def nest(data: bytes, draw: random.Random) -> bytes:
    """A list in a list and so on, deeper than Python's recursion goes, in the place of a part."""
    checkpoint = torch.load(io.BytesIO(data), weights_only=True)
    name = draw.choice(list(checkpoint))
    checkpoint[name] = "here"
    result = io.BytesIO()
    torch.save(checkpoint, result)
    depth = draw.choice([100, 5000])
    nested = b"]" * depth + b"a" * (depth - 1)
    changed = io.BytesIO()
    with zipfile.ZipFile(result) as before, zipfile.ZipFile(changed, "w") as after:
        for member in before.namelist():
            content = before.read(member)
            if member.endswith("data.pkl"):
                content = content.replace(b"X\x04\x00\x00\x00here", nested, 1)
            after.writestr(member, content)
    return changed.getvalue()


def plain_pickle(data: bytes, draw: random.Random) -> bytes:
    """Of what a checkpoint is not, some of it hostile."""
    return pickle.dumps(draw.choice([Executed(), {"script": Executed()}, [], 7, {"script": "dqn_snake"}]))


MUTATIONS = [
    change_value,
    change_value,
    change_value,
    flip_bytes,
    truncate,
    insert_bytes,
    change_member,
    nest,
    plain_pickle,
]


def test_a_damaged_checkpoint_is_refused_in_one_line_or_loaded(script, tries, monkeypatch, capsys, started) -> None:
    monkeypatch.chdir(script.folder)
    flags = {"checkpoint_replay": True} if script.has_replay else {}
    _, folder = script.run(**flags)
    whole = (folder / "checkpoint.pt").read_bytes()

    def start(*arguments: Any, **options: Any) -> None:
        raise started

    monkeypatch.setattr(script.module, "SummaryWriter", start)
    draw = random.Random(script.name)
    loaded = 0
    for number in range(tries(100, 1000)):
        mutate = draw.choice(MUTATIONS)
        try:
            damaged = mutate(whole, draw)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, pickle.PicklingError, AttributeError):
            continue  # torch refuses to make or to save such a tensor
        (folder / "checkpoint.pt").write_bytes(damaged)
        capsys.readouterr()
        about = f"{mutate.__name__}, try {number}"
        try:
            script.parse("--resume", folder)
            script.main(resume=str(folder), total_timesteps=script.longer, **flags)
        except started:
            loaded += 1
        except SystemExit as end:
            said = capsys.readouterr().err
            assert end.code == 2 and said.count("\n") == 1, f"{about}: {said}"
        else:
            raise AssertionError(f"{about}: it ran")
        assert not Path("executed").exists(), about
    shutil.rmtree(folder)
    assert loaded < number
