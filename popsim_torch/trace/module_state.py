"""Puts traced tensors into a user's module for a trace, and removes them afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.private_torch.module_parts import (
    own_buffers,
    own_modules,
    own_parameters,
    unsaved_buffers,
)
from popsim_torch.trace.attribute_changes import Place, UsedTensors, warn_of_changes
from popsim_torch.trace.contents import CONTAINERS, Content
from popsim_torch.trace.kept_objects import (
    OF_MODULES,
    class_state,
    global_state,
    holds_fakes,
    kept_objects,
)
from popsim_torch.wrapper_tensors import is_wrapper

_MOST_BYTES = 1 << 16
"""Larger arrays are data, and are not compared."""


class TracedState:
    """Puts traced tensors in the place of every parameter and buffer, for a scope.

    After the scope the places have their old values, even if forward has changed them.

    Args:
        module: The module; a tied parameter has several places.
        traced: The traced tensor for a host tensor, by the ``id`` of the host tensor.

    Attributes:
        given: The traced tensors, by the names of the places.
    """

    def __init__(self, module: nn.Module, traced: Mapping[int, torch.Tensor]) -> None:
        self._module = module
        self._traced = traced
        # Each dict of a module, with its contents after the next exchange. The key is the id of the
        # dict, because copies of a module may share a dict.
        self._slots: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._unsaved: list[tuple[set[str], set[str]]] = []
        self.given: dict[str, torch.Tensor] = {}

    def __enter__(self) -> TracedState:
        for path, child in self._module.named_modules():
            for slots in (own_parameters(child), own_buffers(child)):
                present = {name: tensor for name, tensor in slots.items() if tensor is not None}
                traced = {name: self._traced[id(tensor)] for name, tensor in present.items()}
                self._slots[id(slots)] = (slots, {**slots, **traced})
                for name, tensor in traced.items():
                    self.given[f"{path}.{name}" if path else name] = tensor
            self._unsaved.append((unsaved_buffers(child), set(unsaved_buffers(child))))
        self._exchange()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exchange()
        for names, before in self._unsaved:
            names.intersection_update(before)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the host's tensors in this scope; changes to them in the scope are kept."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for slots, away in self._slots.values():
            here = dict(slots)
            slots.clear()
            slots.update(away)
            away.clear()
            away.update(here)


def _content(value: Any) -> Any:
    """Return a copy of a small array of numbers, or what is in a list, dict, set or tuple."""
    if issubclass(type(value), np.ndarray):  # (isinstance() fails for a proxy of a dead object)
        is_small = value.nbytes <= _MOST_BYTES and value.dtype.kind in "biufc"
        return value.copy() if is_small else None
    return Content(value) if issubclass(type(value), CONTAINERS) else None


def _values(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, None if name in OF_MODULES else _content(value))
        for name, value in list(attributes.items())
    }


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


@contextmanager
def attributes_kept(module: nn.Module, used: UsedTensors) -> Iterator[None]:
    """Remove traced tensors that forward stored on a module, or on an object of it.

    They end with the trace.

    Args:
        module: The module.
        used: Decides whether the former value of an attribute matters.
    """
    objects = list(kept_objects(module))
    known = {id(one) for one, _ in objects}
    # (a layer of PyTorch is changed by the modules around it)
    layers = [(one, module if _is_of_torch(one) else one) for one in module.modules()]
    places = [Place(owner, of, _values(vars(owner))) for owner, of in (*layers, *objects)]
    files = [Place(file, module, _values(names)) for file, names in global_state(module)]
    classes = [Place(kind, one, _values(names)) for kind, one, names in class_state(module)]
    children = [(one, dict(own_modules(one))) for one in module.modules()]
    try:
        yield
        warn_of_changes([*places, *files, *classes], used)
    finally:
        for (one, layers_before), place in zip(children, places, strict=False):
            for name in _without_new_layers(one, layers_before):
                if name in place.before:  # (None, before there was a layer)
                    vars(one)[name] = place.before[name][0]
        for place in places:
            attributes = vars(place.owner)
            for name in [name for name, one in list(attributes.items()) if holds_fakes(one, known)]:
                if name in place.before:
                    attributes[name] = _former(place, name)
                else:
                    del attributes[name]
        for place in (*files, *classes):
            for name, now in place.now():
                if holds_fakes(now, known):
                    if name in place.before:
                        setattr(place.owner, name, _former(place, name))
                    else:
                        delattr(place.owner, name)


def _former(place: Place, name: str) -> Any:
    """Return the value of an attribute before forward; lists and dicts have their items again."""
    value, content = place.before[name]
    if isinstance(content, Content):
        content.restore()
    return value


def _check_new_tensors(module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters that forward registers, and warn of buffers."""
    new = [
        [name for name, one in found if name not in given and holds_fakes(one)]
        for found in (module.named_parameters(), module.named_buffers())
    ]
    if new[0]:
        raise Error(
            f"forward makes parameters: {', '.join(new[0])}. Each run of the program would make "
            "them anew, with other random numbers, and no optimizer trains them. Make layers and "
            "parameters in __init__, or call the model once in eager PyTorch before it is compiled."
        )
    if new[1]:
        logs.python.warning(
            "forward registers buffers: %s. They end with the recording of the program, and each "
            "run of it makes them anew. Register buffers before the model is compiled.",
            ", ".join(new[1]),
        )


def _without_new_layers(module: nn.Module, before: Mapping[str, nn.Module | None]) -> Iterator[str]:
    """Remove the layers with traced tensors that forward has given a module; yield their names."""
    for name, layer in list(own_modules(module).items()):
        if layer is None or before.get(name) is layer:
            continue
        if any(map(holds_fakes, (*layer.parameters(), *layer.buffers()))):
            del own_modules(module)[name]
            yield name


def check_traceable(module: nn.Module, *, needs_values: bool = True) -> None:
    """Refuse modules whose code cannot be traced, or whose tensors have no data yet.

    Args:
        module: The module.
        needs_values: Whether tensors on the device ``meta``, which have no values, are refused.

    Raises:
        Error: A module is TorchScript, lazy and not called yet, or on the device ``meta``; or one
            of its tensors consists of other tensors.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            name = f"The sub-module '{path}'" if path else "The model"
            raise Error(
                f"{name} comes from torch.jit.script or torch.jit.trace: its Python code, which "
                "would be compiled, is lost. Use the module that it was made from."
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise Error(
                f"'{name}' of a lazy module has no shape yet. Run the model once on the CPU before "
                "it is compiled."
            )
        if needs_values and tensor.is_meta:
            raise Error(
                f"'{name}' is on the device 'meta': it has no values. Make the model on the CPU, "
                "or call model.to_empty(device='cpu') and load its weights."
            )
        if is_wrapper(tensor):
            raise Error(
                f"'{name}' is a {type(tensor).__name__}, which consists of other tensors. Register "
                "those tensors as parameters or buffers of the model."
            )


def with_attributes(traced: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Return a traced tensor with the attributes that the user has set on a host tensor.

    Args:
        traced: Stands for a parameter or buffer.
        host: The parameter or buffer.
    """
    for name, value in vars(host).items():
        vars(traced).setdefault(name, value)
    return traced


def check_not_reassigned(module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Refuse models that replace or delete a parameter or buffer in forward."""
    now = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    _check_new_tensors(module, given)
    for name, tensor in given.items():
        kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Buffer"
        if name not in now:
            raise Error(
                f"{kind} {name} is removed from the model within forward. Keep it, even if it is "
                "not used."
            )
        if now[name] is not tensor:
            raise Error(
                f"{kind} {name} is reassigned within the model's forward. Change it in place "
                f"instead: self.{name}.copy_(src)."
            )
