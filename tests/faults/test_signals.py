"""Ctrl-C and SIGTERM at the start and while saving; in the loop and in evaluations they are in test_promises.py."""

import signal

import pytest
import torch
from small_runs import load


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["at the start", "while saving"])
def test_a_signal_saves_and_ends_the_run(script, monkeypatch, capsys, number, when) -> None:
    sent = []
    whole = script.module.SummaryWriter if when == "at the start" else torch.save

    def interrupted(*arguments, **options):
        if not sent:
            sent.append(number)
            signal.raise_signal(number)
        return whole(*arguments, **options)

    if when == "at the start":
        monkeypatch.setattr(script.module, "SummaryWriter", interrupted)
    else:
        monkeypatch.setattr(torch, "save", interrupted)
    summary, folder = script.run(total_timesteps=10**9, checkpoint_every=0.05)
    assert sent and summary["env_steps"] < 10**9
    assert load(folder)["global_step"] == summary["env_steps"]
    assert f"--resume {folder}" in capsys.readouterr().out
    assert not list(folder.glob("*.tmp"))
