"""Scopes of user code in forward: recomputed regions, and groups of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from popsim_torch.errors import Error

_CONVOLUTIONS = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "convolution", "conv_tbc"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    }
)


class Regions:
    """The regions and groups that are open, by their numbers.

    Attributes:
        rebuilt: Number of the region whose values the backward pass recomputes; 0 outside of all.
            For nested regions, it is the outer one: the values of the inner ones are not kept in
            any case.
    """

    def __init__(self) -> None:
        self.rebuilt = 0
        self._num_rebuilt = 0
        self._group = 0
        self._num_groups = 0
        self._num_convolutions = 0

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Put the calls in this scope into a new region, or into the outer one if there is one."""
        outer = self.rebuilt
        if outer == 0:
            self._num_rebuilt += 1
            self.rebuilt = self._num_rebuilt
        try:
            yield
        finally:
            self.rebuilt = outer

    @contextmanager
    def multi_conv(self, check: Callable[[int], None]) -> Iterator[None]:
        """Put the convolutions in this scope into a group.

        Args:
            check: Called with the number of convolutions.

        Raises:
            Error: There is a group already, or no convolution in it.
        """
        if self._group:
            raise Error("Nested poptorch.MultiConv is not supported. Leave the outer scope first.")
        self._num_groups += 1
        self._group = self._num_groups
        self._num_convolutions = 0
        try:
            yield
        finally:
            self._group = 0
        if self._num_convolutions == 0:
            raise Error(
                "Unexpected end_multi_conv: no convolution was called inside of a "
                "poptorch.MultiConv scope. Put the convolutions there, or leave the scope out."
            )
        check(self._num_convolutions)

    def group_of(self, function: Callable[..., Any]) -> int:
        """Count a call, and return the number of its group, or 0."""
        if not self._group or getattr(function, "__name__", "") not in _CONVOLUTIONS:
            return 0
        self._num_convolutions += 1
        return self._group
