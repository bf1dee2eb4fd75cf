"""Each script with flags for a run of about a second, for the tests that hold for all scripts."""

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
COMMON = dict(device="cpu", threads=1, eval_every=0.0, log_every=0.1, video=False)
SMALL = {
    "dqn_snake": dict(
        board="6x6",
        num_envs=24,
        hidden_size=32,
        batch_size=48,
        buffer_size=2000,
        learning_starts=200,
        total_timesteps=1200,
        eval_episodes=10,
    ),
    "ppo_snake": dict(
        board="6x6",
        num_envs=24,
        num_steps=5,
        num_minibatches=4,
        hidden_size=32,
        total_timesteps=1200,
        eval_episodes=10,
    ),
    "dqn_snake_sb3_compat": dict(
        env_id="Snake-v0",
        board="6x6",
        batch_size=16,
        buffer_size=2000,
        learning_starts=50,
        learning_rate=1e-3,
        target_update_interval=100,
        total_timesteps=400,
        eval_episodes=3,
    ),
    "ppo_metta": dict(
        num_envs=4,
        num_steps=16,
        num_minibatches=4,
        bptt_horizon=8,
        rnn="mingru",
        hidden_size=16,
        total_timesteps=4 * 384,
        eval_episodes=6,
    ),
    "dqn_mario_async": dict(
        num_collectors=0,
        envs_per_collector=6,
        ring_blocks=16,
        size=48,
        channels=4,
        hidden_size=16,
        batch_size=8,
        replay_ratio=1.0,
        buffer_size=1000,
        learning_starts=200,
        total_timesteps=600,
        eval_episodes=3,
    ),
}
OTHER_SHAPE = {  # flags of a network with other weights
    "dqn_snake": dict(hidden_size=64),
    "ppo_snake": dict(hidden_size=64),
    "dqn_snake_sb3_compat": dict(policy="transformer", env_id="SnakeOneHot-v0"),
    "ppo_metta": dict(hidden_size=32),
    "dqn_mario_async": dict(hidden_size=32),
}

ONE_FAST = pytest.mark.parametrize(
    "script",
    [name if name == "ppo_snake" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL],
    indirect=True,
)


class Script:
    """A script, and a folder for its runs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.module = importlib.import_module(name)
        self.flags = COMMON | SMALL[name] | {"run_dir": str(folder)}

    @property
    def longer(self) -> int:
        """--total-timesteps with which a finished run continues."""
        return 2 * self.flags["total_timesteps"]

    @property
    def has_replay(self) -> bool:
        return hasattr(self.module.Args, "checkpoint_replay")

    def main(self, **flags: Any) -> dict[str, Any]:
        return self.module.main(self.module.Args(**self.flags | flags))

    def run(self, **flags: Any) -> tuple[dict[str, Any], Path]:
        """Train for a moment; gives the summary and the run folder."""
        name = flags.setdefault("run_name", "run")
        return self.main(**flags), self.folder / name

    def parse(self, *words: object) -> Any:
        """The Args of a command line."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{self.name}.py", *map(str, words)])
            return self.module.parse_args()

    def cli(self, *words: object) -> dict[str, Any]:
        """What `main` gives for a command line."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{self.name}.py", *map(str, words)])
            args = self.module.parse_args()
        return self.module.main(args)

    def program(self, *words: str) -> None:
        """The script from its first line to its last, in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{self.name}.py", *words])
            runpy.run_path(str(ROOT / f"{self.name}.py"), run_name="__main__")

    def words(self, **flags: Any) -> list[str]:
        """The small flags as a command line."""
        return command_line(self.flags | flags)


def command_line(flags: dict[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if type(value) is bool:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def checkpoint(folder: Path) -> dict[str, Any]:
    """The checkpoint with dotted names: q_network.head.bias."""

    def flat(prefix: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        leaves = {}
        for key, part in value.items():
            leaves |= flat(f"{prefix}.{key}" if prefix else str(key), part)
        return leaves

    return flat("", load(folder))


def network_of(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that learn, in a checkpoint: its first part that is a dict of tensors."""
    for part in saved.values():
        if isinstance(part, dict) and all(isinstance(value, torch.Tensor) for value in part.values()):
            return part
    raise AssertionError("no network")


def weights_of(folder: Path) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in network_of(load(folder)).values()])


def scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refusal(capsys: pytest.CaptureFixture, call: Callable[..., Any], *arguments: Any, **flags: Any) -> str:
    """The one line of a call that ends with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        call(*arguments, **flags)
    said = capsys.readouterr().err
    assert error.value.code == 2, said
    assert said.count("\n") == 1, said
    return said
