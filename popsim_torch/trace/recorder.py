"""Combines the parts that record data during the trace of forward; each has its own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.ops import op_listener
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.books.call_origins import CallOrigins
from popsim_torch.trace.books.device_loop import DeviceLoopOptimizers, DeviceLoopTrace
from popsim_torch.trace.books.gradients import Gradients
from popsim_torch.trace.books.known_values import KnownValues
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.books.scopes import Scopes
from popsim_torch.trace.books.stand_ins import StandIns
from popsim_torch.trace.control.captures import BodyScopes
from popsim_torch.trace.control.flow import ControlFlow
from popsim_torch.trace.control.recording import BodyRecorder
from popsim_torch.trace.graph.traced_tensors import tensors_in
from popsim_torch.trace.host_changes import HostChanges
from popsim_torch.trace.user_ops import UserOps

# Functions that only read a tensor's metadata: no operation on the device.
_METADATA = frozenset(
    {"size", "dim", "element_size", "numel", "stride", "is_floating_point", "is_complex", "type"}
)


class Recorder:
    """Holds the parts that record data during the trace; function calls are reported to it.

    The methods of ``FunctionListener`` are methods of the parts.

    Args:
        module: The module being traced.
        stages: Knows the stage of the current call.
        result: Receives constants, prints and gradient marks.
        module_scopes: Whether to put module paths into scopes.
        location_excludes: Parts of file paths; lines of such files are no origin.

    Attributes:
        gradients: Follows gradients and losses.
        user_ops: Listens to the operations of ``popsim_torch``.
        control_flow: Records loops and branches.
        values: Knows values while forward runs.
        host_changes: Knows which host tensors were made during the trace.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: StageAssigner,
        result: TraceResult,
        module_scopes: bool,
        location_excludes: Sequence[str] = (),
    ) -> None:
        # Another thread, or host code that forward calls, may call modules as well.
        scopes = Scopes(
            module if module_scopes else None,
            is_followed=lambda: op_listener.get() is self.user_ops,
        )
        self._origins = CallOrigins(scopes, stages, location_excludes)
        self._stand_ins = StandIns(result)
        self.host_changes = HostChanges(
            self._stand_ins.lasts, self._stand_ins.note_reads, self._stand_ins.is_constant
        )
        self.gradients = Gradients(result, self._origins)
        body_scopes = BodyScopes(self._stand_ins, self._origins)
        self.values = KnownValues(result, body_scopes.constant)
        self.control_flow = ControlFlow(
            BodyRecorder(result.controls, self._origins, self.gradients, self.values, body_scopes)
        )
        self.user_ops = UserOps(
            result, self._origins, self.gradients, self._stand_ins, body_scopes, self.control_flow
        )
        self.following_modules = scopes.following_modules

        self.known = body_scopes.known
        self.known_value = self.values.find
        self.seen_outside = body_scopes.seen_outside
        self.constant = body_scopes.constant
        self.gradients_wanted = self._stand_ins.gradients_wanted
        self.after_call = self.gradients.after_call
        self.mark_loss = self.gradients.mark_loss
        self.mark_differentiated = self.gradients.mark_differentiated
        self.hook = self.user_ops.hook
        self._endings: list[Callable[[], None]] = []
        self.after_backward = self._endings.append
        self.was_used, self.is_copy = self._stand_ins.was_used, self._stand_ins.is_copy
        self.differs_in_runs = self._stand_ins.differs_in_runs
        self.is_state = self._stand_ins.is_state
        self.is_memory_of_state = self._stand_ins.is_memory_of_state
        self.hook_added = self.gradients.hook_added
        self._refusals: list[str] = []

    def note_refusal(self, message: str) -> None:
        """Record an error that forward gets for a call, and may catch."""
        self._refusals.append(message)

    def warn_of_caught_errors(self) -> None:
        """Warn if forward has gone on after an error of this package."""
        if self._refusals:
            logs.python.warning(
                "forward has caught an error of poptorch and goes on as its 'except' says, which "
                "eager PyTorch does not: %s",
                self._refusals[-1],
            )

    @property
    def is_inside_of_body(self) -> bool:
        """Whether the body of a loop or branch inside of forward is being traced."""
        return self.gradients.is_inside_of_body

    @property
    def loop(self) -> DeviceLoopTrace | None:
        """The device loop, if its body is traced."""
        return self._origins.loop

    def begin_loop(
        self,
        request: DeviceLoopOptimizers,
        parameters: Mapping[str, torch.Tensor],
        scale: torch.Tensor,
    ) -> DeviceLoopTrace:
        """Record that the body of a device loop is traced."""
        backward_of = self.gradients.backward_of
        loop = DeviceLoopTrace(
            request, parameters, self.known, backward_of, self._origins.begin, scale
        )
        self._origins.loop = loop
        return loop

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        self.values.start(state)
        self._stand_ins.start(state)
        self.gradients.start(state)

    def end(self) -> None:
        """Record that forward and backward have been traced."""
        for ending in self._endings:
            ending()
        self._stand_ins.keep_host_reads()

    def close(self) -> None:
        """Forget the trace.

        Autograd's nodes have hooks with references to the parts, which the garbage collector does
        not see: without this call they would never be freed.
        """
        for part in (self.gradients, self._stand_ins, self.values, self.user_ops):
            part.close()
        self.host_changes.clear()
        self._endings.clear()
        self._origins.loop = None

    def after_function(self, results: Any) -> None:
        """Record the results of a ``torch.autograd.Function`` of the user."""
        if op_listener.get() is self.user_ops:
            self._origins.begin()
            for tensor in tensors_in(results):
                self.after_call(tensor)

    def before_call(self, function: Callable[..., Any]) -> None:
        """Record the origin of the nodes that are made next."""
        if getattr(function, "__name__", "") not in _METADATA:
            self._origins.begin(multi_conv=self._origins.regions.group_of(function))
