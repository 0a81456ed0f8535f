"""The settings of ``Options`` for what a call returns. Package private."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from popsim_torch.enums import OutputMode
from popsim_torch.errors import (
    UsageAssertionError,
    UsageAttributeError,
    UsageTypeError,
    UsageValueError,
)
from popsim_torch.options.base import (
    REFUSALS,
    OptionsGroup,
    Setting,
    require,
    require_enum,
    shown,
)
from popsim_torch.tensors.selections import Select, Selection, as_selection

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger("poptorch::python")


class OutputOptions(OptionsGroup):
    """Settings for which micro-batches are returned, and which tensors besides the outputs."""

    output_mode = Setting(int(OutputMode.Default), enum=OutputMode, setter="outputMode")
    output_return_period = Setting(1, setter="outputMode")
    anchored_tensors = Setting[dict[str, list[Any]]]({}, setter="anchorTensor")

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Choose which micro-batches of a call are returned.

        Args:
            output_mode: The mode; by default ``Final`` for training and ``All`` for inference.
            output_return_period: The period of ``EveryN`` (device iterations). Other modes ignore
                it, with a log line.

        Returns:
            The options.

        Raises:
            UsageAssertionError: The mode is not an ``OutputMode``, or ``EveryN`` has no positive
                period.
        """
        period = _checked_period("Options.outputMode", output_mode, output_return_period)
        return self.set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Return whether ``outputMode`` was never set."""
        return self.output_mode == OutputMode.Default

    def _take_anchors(self, owner: object, why_not: str = "") -> None:
        """Refuse anchors and observations that an owner would not see, or accept them again.

        They are accepted if no owner refuses them. An owner that is deleted refuses nothing.

        Args:
            owner: A program, function or the like that uses these options.
            why_not: Why it would not see them, as a clause, and what to do; empty if it would.
        """
        refusals = self.__dict__.setdefault(REFUSALS, WeakKeyDictionary())
        refusals.pop(owner, None)
        if why_not:
            refusals[owner] = why_not

    @property
    def _why_no_anchors(self) -> str:
        """Why anchors and observations are refused, as a clause; empty if they are accepted."""
        refusals: Mapping[object, str] = self.__dict__.get(REFUSALS, {})
        return next(iter(list(refusals.values())), "")

    def anchorTensor(
        self,
        short_name: str,
        long_name: Select,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = None,
        *,
        anchor_mode: OutputMode | None = None,
        anchor_return_period: int | None = None,
    ) -> Self:
        """Request an internal tensor, which ``model.getAnchoredTensor`` returns after a run.

        It can be called on frozen options, until a model is wrapped with them, because the model
        has its own copy. On ``model.options`` it takes effect until the model is compiled. The
        requests are in ``options.anchored_tensors``: for each short name a list of the long name,
        whether to use the model's mode and period, the mode and the period.

        Args:
            short_name: The name for ``getAnchoredTensor``. The same name again replaces the
                request.
            long_name: The name of the tensor in the graph, one of ``model.getTensorNames()``. Or a
                pattern for several tensors, or any other selection (see ``poptorch.tensors``): then
                ``getAnchoredTensor`` returns a dict of tensors by name, also if only one matches. A
                string with ``*``, ``?`` or ``[`` is a pattern if no tensor has this name. If
                nothing matches, there is a warning when the model is compiled, and the dict is
                empty.
            output_mode: Which micro-batches to return; the model's mode and period if None.
            output_return_period: The period of ``EveryN`` (device iterations). A period up to
                ``deviceIterations`` is counted in each call, a longer one across calls. Other modes
                ignore it, with a log line.
            anchor_mode: An older spelling of ``output_mode``.
            anchor_return_period: An older spelling of ``output_return_period``.

        Returns:
            The options.

        Raises:
            UsageTypeError: Both spellings of one argument are given.
            UsageAttributeError: A model was wrapped with these options, a function with them was
                recorded, or they belong to a model that is already compiled.
            UsageAssertionError: The short name is not a string, the long name is neither a name nor
                a selection (or an empty list), the mode is not an ``OutputMode``, or the
                period of ``EveryN`` is missing or not positive.
        """
        call = f"Options.anchorTensor({short_name!r}, {shown(long_name)})"
        require(isinstance(short_name, str), f"{call}: the short name has to be a string.")
        what = long_name if isinstance(long_name, str) else _checked_selection(call, long_name)
        if self._why_no_anchors:
            raise UsageAttributeError(f"{call}: {self._why_no_anchors}")
        mode = _one_of(call, "mode", output_mode, anchor_mode)
        period = _one_of(call, "return_period", output_return_period, anchor_return_period)
        if mode is not None:
            require_enum(f"{call}: output_mode", mode, OutputMode)
        uses_default = mode is None or mode == OutputMode.Default
        mode = OutputMode.Default if uses_default else mode
        self.anchored_tensors[short_name] = [
            what,
            uses_default,
            int(mode),
            _checked_period(call, mode, period),
        ]
        return self


def _checked_selection(call: str, select: object) -> Selection:
    """Return the selection of an anchor with a pattern."""
    try:
        return as_selection(call, select)
    except (UsageTypeError, UsageValueError) as error:
        raise UsageAssertionError(error.message) from None


def _one_of(call: str, name: str, output: Any, anchor: Any) -> Any:
    """Return the value of an argument with two names."""
    if output is not None and anchor is not None:
        raise UsageTypeError(
            f"{call}: got both output_{name} and anchor_{name}, two spellings of one argument. "
            f"Pass output_{name} only."
        )
    return anchor if output is None else output


def _checked_period(call: str, mode: OutputMode, period: int | None) -> int:
    """Check a mode and a return period, and return the period to store."""
    require_enum(f"{call}: output_mode", mode, OutputMode)
    if mode == OutputMode.EveryN:
        require(
            isinstance(period, int) and period > 0,
            f"{call}: output_return_period={period!r}; OutputMode.EveryN needs an int above 0. "
            "Pass output_return_period=10 for every tenth device iteration, or OutputMode.All for "
            "each of them.",
        )
        return int(period or 1)
    if period is not None:
        _logger.info("%s: output_return_period is ignored: only EveryN uses it.", call)
    return 1
