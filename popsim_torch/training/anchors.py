"""The values that the anchors of a fit recorded, also after the program has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from popsim_torch.anchors import unknown_anchor
from popsim_torch.errors import UsageAssertionError
from popsim_torch.executor.anchor_axes import RecordedAnchors
from popsim_torch.loops import Function

__all__ = ["FittedAnchors"]


class FittedAnchors(RecordedAnchors):
    """The anchored tensors of the latest run, by short name; each access returns a new tensor.

    Args:
        function: The function whose only loop records the anchors.
        names: The short names of the anchors.
    """

    def __init__(self, function: Function, names: list[str]) -> None:
        self._function: Function | None = function
        self._names = names
        self._kept: dict[str, Any] = {}
        self._kept_axes: dict[str, Any] = {}

    def __getitem__(self, short_name: str) -> Any:
        """Return an anchored tensor, or for an anchor with a pattern its tensors by name.

        Raises:
            UsageAssertionError: The anchor does not exist, or has no value.
        """
        if short_name not in self._names:
            raise unknown_anchor(short_name, self._names, "in the options that are passed")
        found = self._read(short_name) if self._function is not None else self._kept[short_name]
        if isinstance(found, UsageAssertionError):
            raise found
        if isinstance(found, dict):
            return {name: tensor.clone() for name, tensor in found.items()}
        return found.clone()

    def __iter__(self) -> Iterator[str]:
        """Return the short names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of anchors."""
        return len(self._names)

    def __contains__(self, short_name: object) -> bool:
        """Whether the anchor exists, with a value or without."""
        return short_name in self._names

    def axes(self, short_name: str) -> Any:
        """Return the axes of an anchored tensor, as ``executor.anchor_axes`` does.

        Raises:
            UsageAssertionError: The anchor does not exist.
        """
        if short_name not in self._names:
            raise unknown_anchor(
                short_name, self._names, "in the options that are passed", method="anchor_axes"
            )
        if short_name in self._kept_axes:
            return self._kept_axes[short_name]
        return self._read_axes(short_name)

    def keep(self) -> None:
        """Read all anchors before the program ends, and keep their values."""
        self._kept = {name: self._read(name) for name in self._names}
        if self._function is not None and self._function.programs:
            self._kept_axes = {name: self._read_axes(name) for name in self._names}
        self._function = None

    def _read_axes(self, short_name: str) -> Any:
        programs = [] if self._function is None else self._function.programs
        for program in programs:
            return program.anchor_axes(short_name)
        raise UsageAssertionError(f"anchor_axes: '{short_name}' has no axes: nothing has run.")

    def _read(self, short_name: str) -> Any:
        """Return what an anchor recorded, or the error if there is nothing."""
        programs = [] if self._function is None else self._function.programs
        try:
            for program in programs:
                return program.getAnchoredTensor(short_name)
        except UsageAssertionError as error:
            return error.with_traceback(None)
        return UsageAssertionError(
            f"getAnchoredTensor: No tensor with name '{short_name}' yet: the model has not run."
        )
