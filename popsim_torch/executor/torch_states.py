"""The states of an optimizer, as it keeps them on the host.

A program has them by kind (``Accl1``, ``Step``, or the optimizer's own names); PyTorch uses the
names of its own optimizers. Hooks keep both sides equal: ``state_dict()`` and a step on the host
see the states from programs, and the next run takes over the changes of the host.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from popsim_torch.optim.nested import Path, put
from popsim_torch.optim.plan import State
from popsim_torch.optim.step_source import note_own_hook

__all__ = ["connect", "from_host", "moved_by_device", "to_host"]

_ADAM = {"Accl1": "exp_avg", "Accl2": "exp_avg_sq", "Step": "step"}
_NAMES: dict[type[torch.optim.Optimizer], dict[str, str]] = {
    torch.optim.SGD: {"Accl": "momentum_buffer"},
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.RMSprop: {
        "Accl1": "square_avg",
        "Accl2": "momentum_buffer",
        "Accl3": "grad_avg",
        "Step": "step",
    },
}


def _names_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return next((names for kind, names in _NAMES.items() if isinstance(optimizer, kind)), {})


def from_host(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, kept: Sequence[State]
) -> dict[str, torch.Tensor]:
    """Return the states of a parameter on the host, by kind; empty if there are none.

    Args:
        optimizer: Any optimizer but those of ``poptorch.optim``.
        parameter: One of its parameters.
        kept: The states that the program has for the parameter.
    """
    state = optimizer.state.get(parameter, {})
    if not state:
        kept = _made_in_group(optimizer, parameter, kept)
    names = _names_of(optimizer)
    values: dict[str, torch.Tensor] = {}
    for one in kept:
        if one.number == "flag":
            values[one.kind] = torch.ones(())
            continue
        container, path = _container(optimizer, parameter, one)
        value = _found(container, path) if one.path else state.get(names.get(one.kind, ""))
        if value is not None:
            dtype = torch.float64 if one.dtype == torch.float64 else torch.float32
            held = torch.as_tensor(value).detach()
            if held.is_complex():
                dtype = torch.complex64
            wide = held.to("cpu", dtype, copy=True)
            is_count = one.kind == "Step" and not one.path
            values[one.kind] = wide.reshape(1) if is_count else wide
    return values


def _made_in_group(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, kept: Sequence[State]
) -> Sequence[State]:
    """Return the states that steps have put into the group of a parameter that has no others.

    Numbers of groups do not show whether there has been a step; tensors of steps do.
    """
    made = [one for one in kept if one.number == "flag"]
    for one in kept:
        if one.owner == "group" and not one.number:
            container, path = _container(optimizer, parameter, one)
            if _found(container, path) is None:
                return ()
            made.append(one)
    return made if any(one.owner == "group" for one in made) else ()


def to_host(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    kept: Sequence[State],
    values: Mapping[str, torch.Tensor],
    constants: Sequence[tuple[Any, ...]] = (),
) -> None:
    """Write the states of a parameter to the optimizer on the host.

    Args:
        optimizer: Any optimizer but those of ``poptorch.optim``.
        parameter: One of its parameters.
        kept: The states that the program has for the parameter.
        values: The states, by kind.
        constants: Path and value of what else the optimizer keeps for the parameter.
    """
    names = _names_of(optimizer)
    for one in kept:
        if one.kind not in values or one.number == "flag":
            continue
        value = values[one.kind]
        if one.path:
            container, path = _container(optimizer, parameter, one)
            put(container, path, _on_host(one, value))
            if one.owner == "group":
                _moved.setdefault(optimizer, set()).add(path[0])
        elif one.kind in names:
            optimizer.state[parameter][names[one.kind]] = (
                value.reshape(()).clone()
                if one.kind == "Step"
                else value.to(parameter.dtype, copy=True)
            )
    for path, constant in constants:
        put(optimizer.state[parameter], path, copy.copy(constant))


def moved_by_device(optimizer: torch.optim.Optimizer) -> Collection[str]:
    """Return the entries of groups that ``to_host`` has set: steps change them."""
    return _moved.get(optimizer, frozenset())


_moved: WeakKeyDictionary[torch.optim.Optimizer, set[str]] = WeakKeyDictionary()


def _on_host(state: State, value: torch.Tensor) -> Any:
    if state.number == "bool":
        return bool(value)
    if state.number == "int":
        return round(float(value))
    return float(value) if state.number == "float" else value.to(state.dtype, copy=True)


def _container(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: State
) -> tuple[Any, Path]:
    """Return the container of a state on the host, and its path in there."""
    if state.owner == "group":
        group = next(
            group
            for group in optimizer.param_groups
            if any(one is parameter for one in group["params"])
        )
        return group, state.path[1]
    if state.owner == "attribute":
        return vars(optimizer), state.path
    if state.owner == "other":
        return optimizer.state, state.path
    return optimizer.state[parameter], state.path


def _found(container: Any, path: Path) -> Any:
    for key in path:
        try:
            container = container[key]
        except (KeyError, IndexError):
            return None
    return container


_connected: WeakSet[torch.optim.Optimizer] = WeakSet()


def connect(
    optimizer: torch.optim.Optimizer,
    give: Callable[[torch.optim.Optimizer], object],
    taken: Callable[[torch.optim.Optimizer], object],
) -> None:
    """Install hooks on an optimizer that report the use of its states on the host.

    Args:
        optimizer: Any optimizer but those of ``poptorch.optim``.
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

    for hook in (before, behind):
        note_own_hook(hook)
    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(behind)
    optimizer.register_load_state_dict_post_hook(behind)
    # Copies and pickles ask the object, not its class, what they have to keep.
    vars(optimizer)["__getstate__"] = _kept_with_states(weakref.ref(optimizer), give)


def _kept_with_states(
    held: Callable[[], torch.optim.Optimizer | None],
    give: Callable[[torch.optim.Optimizer], object],
) -> Callable[[], Any]:
    """Return the ``__getstate__`` of an optimizer whose states are on a device."""

    def getstate() -> Any:
        optimizer = held()
        assert optimizer is not None
        give(optimizer)
        kept: Any = type(optimizer).__getstate__(optimizer)
        if not isinstance(kept, dict):
            return kept
        return {name: value for name, value in kept.items() if name != "__getstate__"}

    return getstate
