"""The elements of infeed queues that an iteration takes: as arguments, and by ``next(queue)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.feeds import InfeedQueue
from popsim_torch.feeds.infeed import taking
from popsim_torch.ops import op_listener
from popsim_torch.trace.books.device_loop import UnknownObject
from popsim_torch.trace.graph.origin import user_line

__all__ = ["Elements"]


class Elements:
    """The elements that the iterations of one loop take.

    Args:
        arguments: The queue whose elements are arguments of the body; None if there is none.
        others: The queues on which the body calls ``next``.
    """

    def __init__(self, arguments: InfeedQueue | None, others: Sequence[InfeedQueue]) -> None:
        self._arguments = arguments
        first = [] if arguments is None else [arguments]
        self.infeeds = [*first, *(one for one in others if one is not arguments)]
        self._kinds = [infeed._element() for infeed in self.infeeds]

    def inputs(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, _native.InputPlace]]:
        """Yield name, shape, dtype and source of each tensor that an iteration gets."""
        for number, (_, components) in enumerate(self._kinds):
            for position, (dtype, shape) in enumerate(components):
                name = f"infeed{number or ''}[{position}]"
                yield name, tuple(shape), dtype, _native.InputPlace(number, position)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the body that follow the carried values.

        Args:
            tensors: The tensors of ``inputs``, in an iteration.
        """
        if self._arguments is None:
            return (), {}
        structure, components = self._kinds[0]
        return self._arguments._arguments(structure, list(tensors[: len(components)]))

    @contextmanager
    def at_hand(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let ``next(queue)`` return the iteration's element in this scope.

        Args:
            tensors: The tensors of ``inputs``, in an iteration.
        """
        left: dict[int, Any] = {}
        rest = list(tensors)
        for infeed, (structure, components) in zip(self.infeeds, self._kinds, strict=True):
            own, rest = rest[: len(components)], rest[len(components) :]
            left[id(infeed)] = structure.build(own)

        def take(infeed: InfeedQueue) -> Any:
            if infeed is self._arguments:
                raise Error(
                    f"next(queue){user_line(' at ')}: the elements of this InfeedQueue are "
                    "arguments of the body. Use the arguments, or call the loop without `infeed`."
                )
            if not any(infeed is known for known in self.infeeds):
                raise UnknownObject(infeed)
            listener: Any = op_listener.get()
            if listener.is_inside_of_body:
                raise Error(
                    f"next(queue){user_line(' at ')}: an iteration of the device loop takes one "
                    "element, before its inner loops and branches. Take it there, and pass "
                    "it to them."
                )
            if id(infeed) not in left:
                raise Error(
                    f"next(queue){user_line(' at ')}: an iteration takes one element of an "
                    "InfeedQueue, and this is the second one. Put more data into an element, or "
                    "make two iterations."
                )
            return left.pop(id(infeed))

        token = taking.set(take)
        try:
            yield
        finally:
            taking.reset(token)
