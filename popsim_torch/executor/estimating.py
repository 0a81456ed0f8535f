"""``executor.estimate``: what the model would cost on an IPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from popsim_torch.errors import Error
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import Compilation, compile_program, run_settings
from popsim_torch.executor.compile_request import CompileRequest
from popsim_torch.executor.costs import compiled_estimate, estimate_request
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.life_cycle import LifeCycle
from popsim_torch.executor.reach import failures_told
from popsim_torch.machine import Estimate, EstimateRequest, estimate_program

__all__ = ["Estimating", "compilation_request", "request_estimate"]


def compilation_request(c: Compilation) -> EstimateRequest:
    """Return the request to estimate a program that was compiled up to the host."""
    return estimate_request(
        c.found.program,
        run_settings(c),
        c.request.options,
        trains=c.plan is not None,
        fed=c.request.fed,
        shapes=c.interface.arguments.shapes,
    )


def request_estimate(request: CompileRequest) -> Estimate:
    """Compile a model up to its program, and return the estimate; nothing is allocated."""
    with failures_told(request.module), host_weights.without_sync():
        compilation = compile_program(replace(request, needs_values=False))
        return estimate_program(compilation_request(compilation))


class Estimating:
    """The part of an executor that estimates what its model would cost.

    Args:
        device: The executor's program.
        life: Makes the requests to compile the model.
    """

    def __init__(self, device: DeviceProgram, life: LifeCycle) -> None:
        self._device = device
        self._life = life

    def estimate(self, *args: Any, **kwargs: Any) -> Estimate:
        """Return what the model would cost on an IPU: cycles, memory, time; all simulated.

        Nothing runs, and no value changes. ``Options.machine`` chooses the machine. As long as the
        model is not compiled, its tensors and the arguments may be on the device ``meta``.

        Args:
            *args: The arguments of a call; not needed if the model is compiled. A model that is not
                compiled stays so.
            **kwargs: The keyword arguments of the call.

        Raises:
            Error: The model is not compiled and there are no arguments, or it cannot be compiled.
        """
        compiled = self._device.compiled
        if compiled is None:
            if not args and not kwargs:
                raise Error(
                    "estimate: the model is not compiled, and there are no arguments to estimate "
                    "it for. Pass the arguments of a call: estimate(x)."
                )
            return request_estimate(self._life.request(args, kwargs))
        if args or kwargs:
            compiled.arguments.flatten(args, kwargs)  # raises if they differ from the first call's
        return compiled_estimate(compiled, self._device.options)
