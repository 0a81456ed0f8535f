"""``MultiConv``: groups convolutions that do not depend on each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

import torch

from popsim_torch.enums import MultiConvPlanType
from popsim_torch.errors import Error, UsageAssertionError, UsageValueError
from popsim_torch.ops import op_listener

__all__ = ["MultiConv"]


class MultiConv:
    """Group the convolutions inside of a ``with`` statement; it has no effect on values.

    The scope may contain other operations as well, and an object may be entered several times. The
    settings are stored for the back end. A single value applies to all convolutions of the group; a
    list has one value for each. Outside of a traced model only the types of the settings are
    checked.

    Raises:
        Error: While a model is compiled: a group is inside of another group, a group has no
            convolution, or the number of entries in a setting differs from the number of
            convolutions.

    Example:
        ::

            with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
                y = self.left(x)
                z = self.right(x)
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def availableMemoryProportions(self, value: float | list[float] | tuple[float, ...]) -> Self:
        """Set the share of a tile's memory that convolutions may use; no effect on values.

        Args:
            value: From 0 to 1; or one number for each convolution.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The value is neither a number nor a list of numbers.
        """
        return self._set("availableMemoryProportions", value, _is_proportion, _bad_proportion)

    def partialsTypes(
        self, value: torch.dtype | list[torch.dtype] | tuple[torch.dtype, ...]
    ) -> Self:
        """Set the dtype of partial sums on the real machine; no effect on values.

        Use ``Options.Precision.setPartialsType`` to make sums of float16 products float16.

        Args:
            value: ``torch.float`` or ``torch.half``; or one of them for each convolution.

        Returns:
            The object itself.

        Raises:
            UsageValueError: The value is something else.
        """
        return self._set("partialsTypes", value, _is_partials_type, _bad_partials_type)

    def enableConvDithering(self, value: bool | list[bool] | tuple[bool, ...]) -> Self:
        """Choose whether convolutions start on different tiles; no effect on values.

        Args:
            value: A bool; or one for each convolution.

        Returns:
            The object itself.

        Raises:
            UsageValueError: The value is something else.
        """
        return self._set("enableConvDithering", value, _is_bool, _bad_dithering)

    def planType(self, value: MultiConvPlanType) -> Self:
        """Choose how the convolutions share the chip; no effect on values.

        Raises:
            UsageAssertionError: The value is not a ``MultiConvPlanType``.
        """
        if not isinstance(value, MultiConvPlanType):
            raise UsageAssertionError(
                f"MultiConv.planType: Invalid plan type {value!r}. Pass a "
                "poptorch.MultiConvPlanType."
            )
        self._settings["planType"] = value
        return self

    def perConvReservedTiles(self, value: int) -> Self:
        """Set the smallest number of tiles for each convolution; no effect on values.

        Raises:
            UsageAssertionError: The value is not an int.
        """
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageAssertionError(
                f"MultiConv.perConvReservedTiles: Invalid number of tiles {value!r}. Pass an int."
            )
        self._settings["perConvReservedTiles"] = value
        return self

    def cycleBackOff(self, value: float) -> Self:
        """Set how much slower than the best plan a plan may be, as a share; no effect on values.

        Raises:
            UsageAssertionError: The value is not a float.
        """
        if not isinstance(value, float):
            raise UsageAssertionError(
                f"MultiConv.cycleBackOff: Invalid share {value!r}. Pass a float."
            )
        self._settings["cycleBackOff"] = value
        return self

    def __enter__(self) -> Self:
        listener = op_listener.get()
        if listener is not None:
            self._stack.enter_context(listener.multi_conv(self._check_counts))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _set(
        self,
        name: str,
        value: Any,
        is_one: Callable[[object], bool],
        error: Callable[[object], Error],
    ) -> Self:
        several = isinstance(value, (list, tuple))
        if not all(map(is_one, value if several else [value])):
            raise error(value)
        self._settings[name] = list(value) if several else value
        return self

    def _check_counts(self, num_convolutions: int) -> None:
        """Check the settings of a group with some number of convolutions."""
        for name, value in self._settings.items():
            if isinstance(value, list) and len(value) != num_convolutions:
                raise Error(
                    f"MultiConv.{name}: {len(value)} entries for the {num_convolutions} "
                    "convolutions in the scope. Pass one entry for each, or a single value."
                )


def _is_proportion(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bad_proportion(value: object) -> Error:
    return UsageAssertionError(
        f"MultiConv.availableMemoryProportions: Invalid available memory proportion {value!r}. "
        "Pass a float, or a list or tuple of floats."
    )


def _is_partials_type(value: object) -> bool:
    return value in (torch.float32, torch.float16)


def _bad_partials_type(value: object) -> Error:
    return UsageValueError(
        f"MultiConv.partialsTypes: Invalid partials types {value!r}. Pass torch.float or "
        "torch.half, or a list or tuple of these."
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _bad_dithering(value: object) -> Error:
    return UsageValueError(
        f"MultiConv.enableConvDithering: Invalid values {value!r}. Pass a bool, or a list or tuple "
        "of bools."
    )
