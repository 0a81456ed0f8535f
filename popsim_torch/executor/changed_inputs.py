"""Inputs that forward changes in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.executor.host_weights import plain, without_sync
from popsim_torch.executor.memory_in_common import memory_of

__all__ = ["check_apart"]

_MOST_PLACES = 1000
# The addresses of inputs that are apart from the weights of a model.
_apart: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()


def check_apart(
    changed: Collection[int],
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    module: nn.Module,
) -> None:
    """Refuse inputs that change together with others in eager PyTorch: the device has copies.

    Args:
        changed: The positions of the inputs that forward changes.
        names: The names of the inputs.
        inputs: The inputs of a call, contiguous in memory.
        module: The model.

    Raises:
        Error: A changed input has memory in common with another input, or with a weight or buffer.
    """
    known = _apart.setdefault(module, set())
    places = {inputs[position].data_ptr() for position in changed}
    others = [(f"input {name}", one) for name, one in zip(names, inputs, strict=True)]
    if not places <= known:  # (the weights stay where they are)
        with without_sync():
            state = [*module.named_parameters(), *module.named_buffers()]
        others += [(f"'{name}' of the model", plain(one)) for name, one in state]
    elif len(inputs) == 1:
        return
    for position in changed:
        begin, end = memory_of(inputs[position])
        for place, (name, other) in enumerate(others):
            start, stop = memory_of(other)
            if place != position and start < end and begin < stop:
                raise Error(
                    f"forward changes input {names[position]} in place, which shares memory with "
                    f"{name}. In eager PyTorch both change; the device has a copy of each. Pass "
                    f"{names[position]}.clone()."
                )
    if len(known) > _MOST_PLACES:
        known.clear()
    known |= places
