"""Notices that host tensors have changed that forward has read as constants of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch import _native, logs
from popsim_torch.trace import TraceResult
from popsim_torch.trace.graph.traced_tensors import has_memory

__all__ = ["Constant", "ConstantWatch", "constants_of"]

Constant = tuple[str, str]
"""The path of a module, and the name of an attribute of it."""


def constants_of(module: nn.Module, traced: TraceResult) -> tuple[Constant, ...]:
    """Return the attributes with host tensors that forward has read.

    Args:
        module: The model.
        traced: Its trace.
    """
    read = {id(one) for one in traced.host_reads if not one.is_inference()}  # (without a count)
    return tuple(
        (path, name)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if id(value) in read
    )


class ConstantWatch:
    """The host tensors that forward has read from attributes, when the model was compiled.

    Args:
        constants: Their places.
        attributes: The attributes of each module that has one, where the user changes them.
    """

    def __init__(
        self, constants: Sequence[Constant], attributes: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._constants = constants
        self._places = [(attributes[path], name) for path, name in constants]
        self._tensors = [own[name] for own, name in self._places]
        self._marks = self._present_marks()
        self._warned = False

    def check(self) -> None:
        """Warn once if a tensor has changed, or another one is in its place."""
        if self._warned:
            return
        marks = self._present_marks()
        if marks == self._marks:
            return
        present = [own.get(name) for own, name in self._places]
        names = [
            f"{path}.{name}" if path else name
            for i, (path, name) in enumerate(self._constants)
            if self._has_changed(i, present[i])
        ]
        self._tensors, self._marks = present, marks
        if not names:
            return
        self._warned = True
        logs.python.warning(
            "'%s'%s changed on the host, but the compiled model goes on with the value that it was "
            "compiled with: forward reads it as a constant. Make it an input; or a buffer "
            "(register_buffer), and call copyWeightsToDevice() after a change. destroy() releases "
            "the program, and the next call compiles a new one.",
            *(names[0], f" and {len(names) - 1} more" if len(names) > 1 else ""),
        )

    def _present_marks(self) -> bytes:
        try:
            return _native.tensor_marks([own[name] for own, name in self._places], samples=True)
        except (KeyError, RuntimeError, TypeError):
            return b""  # (something else is there)

    def _has_changed(self, i: int, now: Any) -> bool:
        then = self._tensors[i]
        if now is then:
            size = len(self._marks) // len(self._tensors)
            part = self._marks[i * size : (i + 1) * size]
            return _native.tensor_marks([now], samples=True) != part
        if not isinstance(now, torch.Tensor) or not has_memory(now):
            return True
        return now.dtype != then.dtype or not torch.equal(now, then)
