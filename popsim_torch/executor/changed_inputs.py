"""Inputs that forward changes in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.executor.constant_watch import Constant
from popsim_torch.executor.host_weights import plain, without_sync
from popsim_torch.executor.memory_in_common import (
    has_elements_apart,
    have_elements_in_common,
    memory_of,
)

__all__ = ["check_apart"]

_MOST_PLACES = 1000
_Place = tuple[int, tuple[int, ...]]
# The addresses and strides of inputs that are apart from the weights of a model.
_apart: WeakKeyDictionary[nn.Module, set[_Place]] = WeakKeyDictionary()


def check_apart(
    changed: Collection[int],
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    module: nn.Module,
    constants: Sequence[Constant],
) -> None:
    """Refuse inputs that change together with others in eager PyTorch: the device has copies.

    Args:
        changed: The positions of the inputs that forward changes.
        names: The names of the inputs.
        inputs: The inputs of a call, in the caller's memory.
        module: The model.
        constants: The attributes with host tensors that forward has read.

    Raises:
        Error: A changed input has memory in common with another input, or with a tensor of the
            model; or its own elements have.
    """
    known = _apart.setdefault(module, set())
    places = {_place_of(inputs[position]) for position in changed}
    others = [(f"input {name}", one) for name, one in zip(names, inputs, strict=True)]
    if not places <= known:  # (the weights stay where they are)
        for position in changed:
            _check_elements(names[position], inputs[position])
        with without_sync():
            state = [*module.named_parameters(), *module.named_buffers()]
        state += [
            (f"{path}.{name}" if path else name, value)
            for path, name in constants
            if isinstance(value := vars(module.get_submodule(path)).get(name), torch.Tensor)
        ]
        others += [(f"'{name}' of the model", plain(one)) for name, one in state]
    elif len(inputs) == 1:
        return
    for position in changed:
        begin, end = memory_of(inputs[position])
        for place, (name, other) in enumerate(others):
            start, stop = memory_of(other)
            if (
                place != position
                and start < end
                and begin < stop
                and have_elements_in_common(inputs[position], other)
            ):
                raise Error(
                    f"forward changes input {names[position]} in place, which shares memory with "
                    f"{name}. In eager PyTorch both change; the device has a copy of each. Pass "
                    f"{names[position]}.clone()."
                )
    if len(known) > _MOST_PLACES:
        known.clear()
    known |= places


def _place_of(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.stride()


def _check_elements(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not apart from each other."""
    if not has_elements_apart(tensor):
        raise Error(
            f"forward changes input {name} in place, several elements of which share their "
            f"place in memory (expand, unfold). Pass {name}.clone()."
        )
