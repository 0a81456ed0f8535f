"""The states of a ``torch.optim`` optimizer, as PyTorch keeps them on the host.

A loop's program has them by kind (``Accl1``, ``Step``); PyTorch uses the names of its own
optimizers. Hooks keep both sides equal: ``state_dict()`` and a step on the host see the states from
loops, and the next loop takes over the changes of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

__all__ = ["connect", "from_host", "to_host"]

_ADAM = {"Accl1": "exp_avg", "Accl2": "exp_avg_sq", "Step": "step"}
_NAMES: dict[type[torch.optim.Optimizer], dict[str, str]] = {
    torch.optim.SGD: {"Accl": "momentum_buffer"},
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.RMSprop: {
        "Accl1": "square_avg",
        "Accl2": "momentum_buffer",
        "Accl3": "grad_avg",
    },
}


def _names_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return next((names for kind, names in _NAMES.items() if isinstance(optimizer, kind)), {})


def from_host(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the states of a parameter on the host, by kind; empty if there are none.

    Args:
        optimizer: An optimizer from ``torch.optim``.
        parameter: One of its parameters.
    """
    state = optimizer.state.get(parameter, {})
    found = {kind: state.get(name) for kind, name in _names_of(optimizer).items()}
    values: dict[str, torch.Tensor] = {}
    for kind, value in found.items():
        if value is not None:
            given = torch.as_tensor(value).detach()
            dtype = torch.complex64 if given.is_complex() else torch.float32
            wide = given.to("cpu", dtype, copy=True)
            values[kind] = wide.reshape(1) if kind == "Step" else wide
    return values


def to_host(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, values: dict[str, torch.Tensor]
) -> None:
    """Write the states of a parameter to the optimizer on the host.

    Args:
        optimizer: An optimizer from ``torch.optim``.
        parameter: One of its parameters.
        values: The states, by kind.
    """
    names = _names_of(optimizer)
    known = [kind for kind in names if kind in values]
    if not known:
        return
    state = optimizer.state[parameter]
    for kind in known:
        value = values[kind]
        state[names[kind]] = (
            value.reshape(()).clone() if kind == "Step" else value.to(parameter.dtype, copy=True)
        )
    if isinstance(optimizer, torch.optim.RMSprop):
        state.setdefault("step", torch.tensor(0.0))  # PyTorch counts it, but does not use it


_connected: WeakSet[torch.optim.Optimizer] = WeakSet()


def connect(
    optimizer: torch.optim.Optimizer,
    give: Callable[[torch.optim.Optimizer], object],
    taken: Callable[[torch.optim.Optimizer], object],
) -> None:
    """Install hooks on an optimizer that report the use of its states on the host.

    Args:
        optimizer: An optimizer from ``torch.optim``.
        give: Called with the optimizer before its states on the host are read or changed.
        taken: Called with the optimizer after they have changed.
    """
    if optimizer in _connected:
        return
    _connected.add(optimizer)

    def before(one: torch.optim.Optimizer, *_: Any) -> None:
        give(one)

    def behind(one: torch.optim.Optimizer, *_: Any) -> None:
        taken(one)

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(behind)
    optimizer.register_load_state_dict_post_hook(behind)
