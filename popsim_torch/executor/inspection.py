"""The executor's methods for inspection: state, tensor names, anchored tensors, programs."""

from __future__ import annotations

import fnmatch
from typing import Literal, overload

import torch

from popsim_torch import _native
from popsim_torch.anchors import AnchorRequest, unknown_anchor
from popsim_torch.enums import OutputMode
from popsim_torch.errors import UsageAssertionError, UsageTypeError
from popsim_torch.executor.anchor_axes import AnchorAxes, axes_of_anchor
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.tensor_details import TensorTable, tensor_details
from popsim_torch.ir import program_text

__all__ = ["Inspection"]


class Inspection:
    """The part of an executor or loop that inspects its program and changes nothing.

    Args:
        device: The program.
        is_loop: Whether the program is a device loop.
    """

    def __init__(self, device: DeviceProgram, *, is_loop: bool = False) -> None:
        self._device = device
        self._is_loop = is_loop

    def isCompiled(self) -> bool:
        """Return whether the model is compiled."""
        return self._device.compiled is not None

    def isAttachedToDevice(self) -> bool:
        """Return whether the model is on its device."""
        return self._device.connection.attached

    @overload
    def getTensorNames(
        self, pattern: str | None = None, details: Literal[False] = False
    ) -> list[str]: ...
    @overload
    def getTensorNames(
        self, pattern: str | None = None, *, details: Literal[True]
    ) -> TensorTable: ...
    def getTensorNames(
        self, pattern: str | None = None, details: bool = False
    ) -> list[str] | TensorTable:
        """Return the names of the tensors of the compiled graph.

        Args:
            pattern: A pattern for the whole name: ``*`` stands for any characters, ``?`` for one,
                ``[ab]`` for one of those listed; None for all names.
            details: Whether to return shape, dtype and phase of each tensor, too: a list of
                ``TensorDetails`` that prints as a table.

        Raises:
            UsageAssertionError: The model is not compiled.
            UsageTypeError: The pattern is not a string.
        """
        compiled = self._device.compiled
        if compiled is None:
            raise UsageAssertionError(
                "getTensorNames: the model is not compiled. Call it once, or model.compile(...)."
            )
        if pattern is not None and not isinstance(pattern, str):
            raise UsageTypeError(
                f"getTensorNames: the pattern is a {type(pattern).__name__}. Pass a string such as "
                "'Gradient___*.weight', and details=True as a keyword."
            )
        found = compiled.program.tensor_names()
        if pattern is not None:
            found = [name for name in found if fnmatch.fnmatchcase(name, pattern)]
        return tensor_details(compiled.program, found) if details else found

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the tensor that an anchor recorded in the last call, or in a ``fit``.

        Args:
            short_name: The first argument of ``Options.anchorTensor``.

        Returns:
            A new CPU tensor; its first dimension holds one entry per micro-batch that the anchor's
            mode keeps. If the period of ``EveryN`` is longer than a call, the tensor comes from the
            latest call that completed a period.

        Raises:
            UsageAssertionError: There is no such anchor, or the model has not run, or its last call
                did not complete, or no period of the anchor has been completed yet.
        """
        if self._device.fitted_anchors is not None:
            return self._device.fitted_anchors[short_name]
        compiled = self._device.compiled
        if compiled is None or compiled.executable.num_runs == 0:
            raise UsageAssertionError(
                f"getAnchoredTensor: No tensor with name '{short_name}' yet: the model has not run."
            )
        if compiled.executable.num_runs != self._device.last_complete_run:
            raise UsageAssertionError(
                f"getAnchoredTensor: '{short_name}' is not complete: the last call was interrupted "
                "or failed, or another thread is in it. Call the model again."
            )
        anchors = compiled.program.anchors
        if short_name not in anchors:
            raise unknown_anchor(short_name, anchors, "before the model is wrapped")
        anchor = anchors[short_name]
        executable = compiled.executable
        if anchor.period and executable.num_iterations < anchor.period:
            raise UsageAssertionError(
                f"getAnchoredTensor: '{short_name}' has no value yet: it records the last "
                f"of every {anchor.period} device iterations, counted over all calls, and "
                f"{executable.num_iterations} have run. Call the model again, or ask for "
                "OutputMode.All."
            )
        with _native.translated_errors():
            if anchor.kept is None:
                return executable.read(anchor.tensor)
            return executable.read_kept(anchor.kept, anchor.tensor)

    def anchor_axes(self, short_name: str) -> AnchorAxes:
        """Return the axes of what ``getAnchoredTensor`` returns for an anchor, outermost first.

        ``value.reshape(axes.sizes)`` gives the tensor these axes. ``All`` and ``EveryN`` have the
        axes ``device iteration`` (``iteration`` in a device loop), ``micro-batch`` (of a weight
        update) and ``replica``; ``Final`` and ``Sum`` only ``replica``. A tensor in the body of a
        ``for_loop`` has an axis ``iteration``. Then the dimensions of the tensor itself follow. A
        tensor that is computed once for each weight update is repeated along ``micro-batch``.

        Args:
            short_name: The first argument of ``Options.anchorTensor``.

        Raises:
            Error: The model is not compiled.
            UsageAssertionError: There is no such anchor.
        """
        if self._device.fitted_anchors is not None:
            return self._device.fitted_anchors.axes(short_name)
        compiled = self._device.require_compiled("anchor_axes")
        anchors = compiled.program.anchors
        if short_name not in anchors:
            raise unknown_anchor(
                short_name, anchors, "before the model is wrapped", method="anchor_axes"
            )
        options = self._device.options
        mode, period = OutputMode(options.output_mode), options.output_return_period
        request = AnchorRequest.of(short_name, options.anchored_tensors[short_name], mode, period)
        return axes_of_anchor(compiled, request, is_loop=self._is_loop)

    def compile_log(self) -> CompileLog:
        """Return the steps that compiled the model, in order, with the time of each.

        The result prints as a table. Each entry has a name, seconds, and a short description of the
        step's result. ``POPSIM_DUMP=folder`` writes the full result of each step to a file.

        Raises:
            Error: The model is not compiled.
        """
        return self._device.require_compiled("compile_log").log

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, for tools that look inside: its programs and the executable.

        Its attributes may change from one version to the next.

        Raises:
            Error: The model is not compiled.
        """
        return self._device.require_compiled("compiled")

    def program(self, *, host: bool = False) -> str:
        """Return the program of the compiled model as text.

        The text has a line for each input tensor of the program, for each op (result, inputs,
        attributes, the modules and the line of code that it comes from) and for each returned
        tensor.

        Args:
            host: Whether to return the program that was fitted to this machine, with fused ops and
                layouts. Otherwise, the program is the one that is the same on every machine.

        Raises:
            Error: The model is not compiled.
        """
        compiled = self._device.require_compiled("program")
        return program_text(compiled.host_program if host else compiled.program)
