"""The executor's methods for inspection: state, tensor names, anchored tensors, programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch

from popsim_torch import _native
from popsim_torch.anchors import AnchorRequest, anchor_of_group, unknown_anchor
from popsim_torch.enums import OutputMode
from popsim_torch.errors import UsageAssertionError
from popsim_torch.executor.anchor_axes import axes_of_anchor
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.tensor_details import TensorTable
from popsim_torch.ir import Program, program_text, select_tensors, tensor_infos
from popsim_torch.ir.selecting import choose
from popsim_torch.tensors.selections import Select, as_selection

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
        self, pattern: Select | None = None, details: Literal[False] = False
    ) -> list[str]: ...
    @overload
    def getTensorNames(
        self, pattern: Select | None = None, *, details: Literal[True]
    ) -> TensorTable: ...
    def getTensorNames(
        self, pattern: Select | None = None, details: bool = False
    ) -> list[str] | TensorTable:
        """Return the names of the tensors of the compiled graph.

        Args:
            pattern: A selection, see ``poptorch.tensors``. A string is a name, or a pattern for the
                whole name: ``*`` stands for any characters, ``?`` for one, ``[ab]`` for one of
                those listed. None for all names.
            details: Whether to return shape, dtype and kind of each tensor, too: a list of
                ``TensorInfo`` that prints as a table.

        Raises:
            UsageAssertionError: The model is not compiled.
            UsageTypeError: The pattern is no selection.
        """
        program = self._compiled_program("getTensorNames")
        found = program.tensor_names()
        if pattern is not None:
            selection = as_selection("getTensorNames", pattern)
            found = [one.name for one in choose(selection, tensor_infos(program, found)).tensors]
        return TensorTable(tensor_infos(program, found)) if details else found

    def names(self, select: Select | None = None) -> TensorTable:
        """Return what is known about the tensors that a selection means.

        Nothing is computed. A part of the selection that means no tensor is a warning with near
        names.

        Args:
            select: A selection, see ``poptorch.tensors``: a name, a pattern, a regular expression,
                a function of a ``TensorInfo``, ``poptorch.tensors.gradients()`` and the like, or a
                list of these. None for all tensors.

        Returns:
            A ``TensorInfo`` for each tensor, in the order in which the program computes them;
            tensors that are computed only if they are asked for come last. The list prints as a
            table; ``tree()`` shows it by module.

        Raises:
            UsageAssertionError: The model is not compiled.
            Error: The selection is a name without wildcards, and no tensor has it.
            UsageTypeError: It is no selection.
            UsageValueError: It is an empty list.
        """
        program = self._compiled_program("names")
        return TensorTable(select_tensors(program, select, "names"))

    def _compiled_program(self, method: str) -> Program:
        compiled = self._device.compiled
        if compiled is None:
            raise UsageAssertionError(
                f"{method}: the model is not compiled. Call it once, or model.compile(...)."
            )
        return compiled.program

    def getAnchoredTensor(self, short_name: str) -> Any:
        """Return the tensor that an anchor recorded in the last call, or in a ``fit``.

        Args:
            short_name: The first argument of ``Options.anchorTensor``.

        Returns:
            A new CPU tensor; its first dimension holds one entry per micro-batch that the anchor's
            mode keeps. If the period of ``EveryN`` is longer than a call, the tensor comes from the
            latest call that completed a period. For an anchor with a pattern, a dict of such
            tensors by their names, in the order of the program; it is empty if none matched.

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
        program = compiled.program
        if short_name in program.groups:
            return {
                name: self._read(compiled, short_name, anchor_of_group(short_name, name))
                for name in program.groups[short_name]
            }
        if short_name not in program.anchors:
            raise unknown_anchor(
                short_name, self._device.options.anchored_tensors, "before the model is wrapped"
            )
        return self._read(compiled, short_name, short_name)

    def _read(self, compiled: CompiledModel, short_name: str, anchored: str) -> torch.Tensor:
        """Return the values of one tensor of an anchor."""
        anchor = compiled.program.anchors[anchored]
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

    def anchor_axes(self, short_name: str) -> Any:
        """Return the axes of what ``getAnchoredTensor`` returns for an anchor, outermost first.

        ``value.reshape(axes.sizes)`` gives the tensor these axes. ``All`` and ``EveryN`` have the
        axes ``device iteration`` (``iteration`` in a device loop), ``micro-batch`` (of a weight
        update) and ``replica``; ``Final`` and ``Sum`` only ``replica``. A tensor in the body of a
        ``for_loop`` has an axis ``iteration``. Then the dimensions of the tensor itself follow. A
        tensor that is computed once for each weight update is repeated along ``micro-batch``.

        Args:
            short_name: The first argument of ``Options.anchorTensor``.

        Returns:
            The axes; for an anchor with a pattern a dict of the axes of each tensor, by its name.

        Raises:
            Error: The model is not compiled.
            UsageAssertionError: There is no such anchor.
        """
        if self._device.fitted_anchors is not None:
            return self._device.fitted_anchors.axes(short_name)
        compiled = self._device.require_compiled("anchor_axes")
        program = compiled.program
        anchored = self._device.options.anchored_tensors
        if short_name not in program.groups and short_name not in program.anchors:
            raise unknown_anchor(
                short_name, anchored, "before the model is wrapped", method="anchor_axes"
            )
        options = self._device.options
        mode, period = OutputMode(options.output_mode), options.output_return_period
        request = AnchorRequest.of(short_name, anchored[short_name], mode, period)
        if short_name not in program.groups:
            return axes_of_anchor(compiled, request, is_loop=self._is_loop)
        own = {
            name: replace(request, short_name=anchor_of_group(short_name, name))
            for name in program.groups[short_name]
        }
        return {
            name: axes_of_anchor(compiled, one, is_loop=self._is_loop) for name, one in own.items()
        }

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
