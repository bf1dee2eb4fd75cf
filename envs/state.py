"""Loading the state of batched games: only games that can be are loaded."""

from collections.abc import Callable

import torch


def load_state(
    state: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], find_problem: Callable[..., str | None]
) -> None:
    """Copy `saved` into the tensors of `state`. Raises ValueError, before anything is changed, for what no game has.

    `find_problem` gets the saved tensors by name, on the CPU, and says what is wrong with them, None if nothing is.
    """
    if set(saved) != set(state):
        raise ValueError(f"games must have {', '.join(state)}")
    for name, tensor in state.items():
        if saved[name].dtype != tensor.dtype or saved[name].shape != tensor.shape:
            raise ValueError(f"{name} must be {tensor.dtype} {list(tensor.shape)}")
    problem = find_problem(**{name: tensor.cpu() for name, tensor in saved.items()})
    if problem:
        raise ValueError(f"not games of these rules: {problem}")
    for name, tensor in state.items():
        tensor.copy_(saved[name])
