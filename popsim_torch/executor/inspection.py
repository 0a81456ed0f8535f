"""What an executor shows of itself: its state, tensor names, anchored tensors, programs."""

from __future__ import annotations

import torch

from popsim_torch import _native
from popsim_torch.errors import UsageAssertionError, closest_names
from popsim_torch.executor.base import ExecutorBase
from popsim_torch.executor.compile import CompiledModel
from popsim_torch.ir import program_text

__all__ = ["Inspection"]


class Inspection(ExecutorBase):
    """The part of an executor that looks at it and changes nothing."""

    @property
    def training_mode(self) -> bool:
        """Whether this executor trains."""
        return self._optimizer is not None

    def isCompiled(self) -> bool:
        """Return whether there is a program for the model."""
        return self._compiled is not None

    def isAttachedToDevice(self) -> bool:
        """Return whether the model is on its device."""
        return self._connection.attached

    def getTensorNames(self) -> list[str]:
        """Return the names of all tensors of the compiled graph.

        Raises:
            UsageAssertionError: The model is not compiled.
        """
        if self._compiled is None:
            raise UsageAssertionError(
                "getTensorNames: the model is not compiled. Call it once, or model.compile(...)."
            )
        return self._compiled.program.tensor_names()

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return what an anchor recorded in the last call, or in a ``fit`` of this executor.

        Args:
            short_name: The first argument of ``Options.anchorTensor``.

        Returns:
            A new CPU tensor; its first dimension holds one entry per micro-batch that the anchor's
            mode keeps. With a period of ``EveryN`` that is longer than a call, what the latest
            call that had such a device iteration recorded.

        Raises:
            UsageAssertionError: There is no such anchor, or the model has not run, or its last call
                was not completed, or no device iteration of the anchor's period has run yet.
        """
        if self._fitted_anchors is not None:
            return self._fitted_anchors[short_name]
        compiled = self._compiled
        if compiled is None or compiled.executable.num_runs == 0:
            raise UsageAssertionError(
                f"getAnchoredTensor: No tensor with name '{short_name}' yet: the model has not run."
            )
        if compiled.executable.num_runs != self._last_complete_run:
            raise UsageAssertionError(
                f"getAnchoredTensor: '{short_name}' is not complete: the last call was interrupted "
                "or failed, or another thread is in it. Call the model again."
            )
        anchors = compiled.program.anchors
        if short_name not in anchors:
            close = closest_names(short_name, anchors)
            hint = f" Closest name: '{close[0]}'." if close else ""
            raise UsageAssertionError(
                f"getAnchoredTensor: No tensor with name '{short_name}' among the "
                f"{len(anchors)} anchors.{hint} Register it with Options.anchorTensor before the "
                "model is wrapped."
            )
        anchor = anchors[short_name]
        executable = compiled.executable
        if anchor.period and executable.num_iterations < anchor.period:
            raise UsageAssertionError(
                f"getAnchoredTensor: '{short_name}' has no value yet: it is that of the last "
                f"of every {anchor.period} device iterations, counted over all calls, and "
                f"{executable.num_iterations} have run. Call the model again, or ask for "
                "OutputMode.All."
            )
        with _native.translated_errors():
            if anchor.kept is None:
                return anchor.of(executable.read(anchor.tensor))
            return anchor.of(executable.read_kept(anchor.kept))

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, for tools that look inside: its programs and the executable.

        What it is made of may change from one version to the next.

        Raises:
            Error: The model is not compiled.
        """
        return self._require_compiled("compiled")

    def program(self, *, host: bool = False) -> str:
        """Return the program of the compiled model as text.

        It has a line for each tensor that the program is given, for each op - result, inputs,
        attributes, and the modules and the line of code that it comes from - and for what comes
        back.

        Args:
            host: The program as it was fitted to this machine: fused, with its layouts. Otherwise
                the one that is the same on every machine.

        Raises:
            Error: The model is not compiled.
        """
        compiled = self._require_compiled("program")
        return program_text(compiled.host_program if host else compiled.program)
