"""The tensors of a function while it is recorded: each has a number, the same in later calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["RecordedTensors", "RecordedValue"]


@dataclass(frozen=True)
class RecordedValue:
    """A tensor of a recorded function, by its number; or a tensor from outside of the function.

    Attributes:
        number: Its index in the list of a call's tensors; None for a tensor from outside.
        outside: The tensor from outside; each call reads the values that it has then.
    """

    number: int | None
    outside: torch.Tensor | None = None

    def among(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor of one call."""
        if self.number is None:
            assert self.outside is not None
            return self.outside
        return tensors[self.number]


class RecordedTensors:
    """The tensors of the recording call: arguments, results of loops, and computed tensors.

    They are held weakly: no later code can read a tensor without references.

    Args:
        arguments: The tensors among the function's arguments.
    """

    def __init__(self, arguments: Iterable[torch.Tensor]) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._numbers: dict[int, int] = {}
        self._differing: set[int] = set()
        # Tensors from outside, changed by values that differ from call to call.
        self._changed: list[torch.Tensor] = []
        for tensor in arguments:
            self.add(tensor, differs=True)

    def add(self, tensor: torch.Tensor, *, differs: bool) -> None:
        """Give a tensor the next number.

        Args:
            tensor: The tensor.
            differs: Whether its values differ from call to call.
        """
        number = len(self._tensors)
        self._tensors.append(weakref.ref(tensor))
        self._numbers[id(tensor)] = number
        if differs:
            self._differing.add(number)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor; None for one from outside of the function."""
        number = self._numbers.get(id(tensor))
        if number is None or self._tensors[number]() is not tensor:
            return None
        return number

    def value(self, tensor: torch.Tensor) -> RecordedValue:
        """Return the recorded value for a tensor."""
        number = self.number_of(tensor)
        return RecordedValue(number, tensor if number is None else None)

    def differs(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values differ from call to call, as for arguments and weights.

        Other tensors from outside count as constants here.
        """
        number = self.number_of(tensor)
        if number is not None:
            return number in self._differing
        return isinstance(tensor, nn.Parameter) or any(tensor is one for one in self._changed)

    def changed(self, tensor: torch.Tensor) -> None:
        """Record that a tensor was changed in place by values that differ from call to call."""
        if self.number_of(tensor) is None:
            self._changed.append(tensor)
        memory = tensor.untyped_storage().data_ptr()
        for one in self.living():
            if one.untyped_storage().data_ptr() == memory:
                number = self.number_of(one)
                assert number is not None
                self._differing.add(number)

    def living(self) -> list[torch.Tensor]:
        """Return the tensors that are still alive, each once."""
        held = [tensor for tensor in (ref() for ref in self._tensors) if tensor is not None]
        return list({id(tensor): tensor for tensor in held}.values())

    def clear(self) -> None:
        """Forget all tensors: later calls have their own."""
        self.__init__(())  # type: ignore[misc]
