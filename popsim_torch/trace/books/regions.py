"""Parts of forward that user code has put a scope around: what is rebuilt, what is a group."""

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
        rebuilt: Number of the region whose values the backward pass rebuilds; 0 outside of all. Of
            regions inside each other it is the outer one: what the inner ones compute is not kept
            in any case.
    """

    def __init__(self) -> None:
        self.rebuilt = 0
        self._num_rebuilt = 0
        self._group = 0
        self._num_groups = 0
        self._num_convolutions = 0

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Let what is called in the scope belong to a region of its own, or to the outer one."""
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
        """Let the convolutions in the scope be a group.

        Args:
            check: Told how many there were.

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
        """Take note of a call, and return the number of the group that it belongs to, or 0."""
        if not self._group or getattr(function, "__name__", "") not in _CONVOLUTIONS:
            return 0
        self._num_convolutions += 1
        return self._group
