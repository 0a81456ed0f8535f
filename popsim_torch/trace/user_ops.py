"""Records the operations of ``popsim_torch`` that user code calls in forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from popsim_torch.custom_ops.registry import CustomCall
from popsim_torch.enums import OverlapMode
from popsim_torch.host_call import CPU, CallArguments
from popsim_torch.ir import NOWHERE
from popsim_torch.ops import PrintFormat, op_listener
from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.modes import DisableTorchFunction, EnableTorchFunction
from popsim_torch.private_torch.proxies import last_node
from popsim_torch.trace.autocast import as_autocast
from popsim_torch.trace.books.call_origins import CallOrigins
from popsim_torch.trace.books.device_loop import DeviceLoopTrace
from popsim_torch.trace.books.gradients import Gradients
from popsim_torch.trace.books.result import PrintRequest, TraceResult
from popsim_torch.trace.books.stand_ins import StandIns
from popsim_torch.trace.control.captures import BodyScopes
from popsim_torch.trace.control.flow import ControlFlow
from popsim_torch.trace.custom import custom_results
from popsim_torch.trace.graph.enqueues import Sums, record_enqueue
from popsim_torch.trace.graph.markers import PrintedTensor
from popsim_torch.trace.graph.origin import note_hook, origin_kept, origin_of, set_origin
from popsim_torch.trace.graph.traced_tensors import (
    current_graph,
    find_node,
    is_host_tensor,
    is_traced,
    node_of,
)
from popsim_torch.trace.host_calls import HostCalls, on_host
from popsim_torch.trace.overlaps import OverlapMark
from popsim_torch.typed_torch import apply

__all__ = ["UserOps"]


class UserOps:
    """The ``op_listener`` during the trace of forward (``OpListener``, ``HostListener``).

    Args:
        result: Receives prints, elements of queues, checkpoints and host calls.
        origins: Knows the origin of the recorded nodes.
        gradients: Follows the gradients of forward.
        stand_ins: Knows the traced tensors of host tensors.
        scopes: Knows the replacements of tensors in the bodies of loops and branches.
        control_flow: Records loops and branches.

    Attributes:
        overlaps: Inputs and outputs that are marked for overlap with computation.
        without_traced_state: Returns a scope that restores the host's parameters and buffers in the
            module.
    """

    def __init__(
        self,
        result: TraceResult,
        origins: CallOrigins,
        gradients: Gradients,
        stand_ins: StandIns,
        scopes: BodyScopes,
        control_flow: ControlFlow,
    ) -> None:
        self._result = result
        self._origins = origins
        self._gradients = gradients
        self._stand_ins = stand_ins
        self._scopes = scopes
        self._control_flow = control_flow
        self._host_calls = HostCalls(result.host_calls)
        self._sums: Sums | None = None
        self._endings: list[Callable[[], None]] = []
        self.overlaps: list[OverlapMark] = []
        self.without_traced_state: Callable[[], AbstractContextManager[None]] = nullcontext
        self.function_mode: Callable[[], AbstractContextManager[object]] = nullcontext
        self.rebuilt_region = origins.regions.rebuilding
        self.multi_conv = origins.regions.multi_conv
        self.name_scope = origins.scopes.named
        self.stand_for = stand_ins.stand_for

    def close(self) -> None:
        """Forget the trace."""
        self.overlaps.clear()
        del self._result, self._host_calls, self.without_traced_state, self.function_mode

    @property
    def loop(self) -> DeviceLoopTrace | None:
        """The device loop, if its body is traced."""
        return self._origins.loop

    @property
    def is_inside_of_body(self) -> bool:
        """Whether the body of a loop or branch inside of forward is being traced."""
        return self._gradients.is_inside_of_body

    def hook(
        self, function: Callable[..., Any], tensor: torch.Tensor | None = None
    ) -> Callable[..., Any]:
        """Return a user's gradient hook that can enqueue and print, as forward can.

        Args:
            function: The hook.
            tensor: The traced tensor of the gradient: the hook belongs to the call that made it.
        """
        node = None if tensor is None else find_node(tensor)
        made_by = NOWHERE if node is None else replace(origin_of(node), backward=True)
        # In a body, the tensors during the recording of its gradient differ from those of forward.
        scope = nullcontext if self.is_inside_of_body else self._as_in_forward

        @functools.wraps(function)  # errors name it
        def called(*gradients: Any) -> Any:
            # Autograd calls it in another thread.
            token, origin = op_listener.set(self), self._origins.current
            try:
                with origin_kept(), scope():
                    if self._origins.in_backward and made_by.call:
                        set_origin(made_by)
                    return function(*gradients)
            finally:
                self._origins.current = origin
                op_listener.reset(token)

        return called

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Observe function calls in this scope, in whichever thread autograd makes them."""
        with EnableTorchFunction(), self.function_mode():
            yield

    def as_autocast(self, operator: str, tensors: Any) -> Any:
        """Return the tensors, cast as autocast casts the arguments of an ATen operator here."""
        return as_autocast(operator, tensors)

    def at_end(self, ending: Callable[[], None]) -> None:
        """Call ``ending`` after the whole forward has been traced."""
        self._endings.append(ending)

    def end_forward(self) -> None:
        """Record that the whole forward has been traced."""
        for ending in self._endings:
            ending()
        self._endings.clear()

    # Tensors that the host sees.

    def print_tensor(
        self, tensor: torch.Tensor, title: str, print_gradient: bool, text_format: PrintFormat
    ) -> torch.Tensor:
        """Return ``tensor``, printed when the program runs."""
        self._origins.begin("PrintTensor")
        tensor = self._scopes.known(tensor)
        key = self._gradients.new_key()
        self._result.prints[key] = PrintRequest(title, None, text_format)
        gradient_key = None
        if print_gradient:
            gradient_key = self._gradients.new_key()
            self._result.prints[gradient_key] = PrintRequest(title, key, text_format)
        result: torch.Tensor = apply(PrintedTensor, tensor, key, gradient_key)
        self._gradients.after_call(result)
        if print_gradient:
            self._gradients.mark_printed(tensor, result)
        return result

    def enqueue(self, queue: Any, structure: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Put an element for a queue into the program."""
        self._origins.begin("Enqueue")
        known = list(map(self._scopes.known, tensors))
        with DisableTorchFunction():
            given = self._traced(known)
            source = self._origins.current.source
            record_enqueue(self._result.enqueues, queue, structure, given, source, self._sums)
        graph = current_graph()
        if self._origins.in_backward and graph is not None:
            note_hook(last_node(graph))

    @contextmanager
    def summed_elements(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Put sums over the micro-batches of a weight update into queues, in this scope."""
        outer, self._sums = self._sums, Sums(dtype)
        try:
            yield
        finally:
            self._sums = outer

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Return a number that is unique among the tensors of this trace."""
        return self._stand_ins.number_of(self._scopes.known(tensor))

    # Tensors that are computed or kept.

    def identity_loss(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the reduced tensor, marked as a loss."""
        self._origins.begin("IdentityLoss")
        tensor = self._scopes.known(tensor)
        with DisableTorchFunction():
            reduced = (
                tensor.view_as(tensor) if reduction == "none" else getattr(tensor, reduction)()
            )
        self._gradients.after_call(reduced)
        self._gradients.mark_loss(reduced)
        return reduced

    def custom_op(self, inputs: Sequence[torch.Tensor], call: CustomCall) -> list[torch.Tensor]:
        """Return the results of a custom operator."""
        given = [self._scopes.traced(one) if is_host_tensor(one) else one for one in inputs]
        self._origins.begin(call.name)
        with DisableTorchFunction():
            results = custom_results(call, given)
        for result in results:
            self._gradients.after_call(result)
        return results

    def checkpoint(self, tensor: torch.Tensor) -> None:
        """Record a value to keep for the backward pass; data of the host is kept anyway."""
        tensor = self._scopes.known(tensor)
        if isinstance(tensor, FakeTensor):
            self._result.checkpoints.append(node_of(tensor))

    def overlap(self, tensor: torch.Tensor, mode: OverlapMode, *, for_input: bool) -> torch.Tensor:
        """Return another tensor with the values of ``tensor``, and record both."""
        self._origins.begin()
        tensor = self._scopes.known(tensor)
        if not is_traced(tensor):
            self.overlaps.append(OverlapMark(None, None, mode, for_input))
            return tensor
        with DisableTorchFunction():
            result = torch.ops.aten.alias.default(tensor)
        self.overlaps.append(OverlapMark(node_of(tensor), node_of(result), mode, for_input))
        self._gradients.after_call(result)
        return result  # type: ignore[no-any-return]

    # Loops, branches, and host calls.

    def for_loop(
        self, count: int, body: Callable[..., Any], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Record a loop."""
        return self._control_flow.for_loop("poptorch.for_loop()", count, body, inputs)

    def cond(
        self,
        condition: Any,
        if_true: tuple[Callable[..., Any], list[Any]],
        if_false: tuple[Callable[..., Any], list[Any]],
    ) -> list[torch.Tensor]:
        """Record a branch."""
        return self._control_flow.cond("poptorch.cond()", condition, if_true, if_false)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run code as outside of the trace: on host tensors, without recording."""
        with on_host(), self.without_traced_state():
            yield

    def host_call(self, cpu: CPU, arguments: CallArguments) -> torch.Tensor | list[torch.Tensor]:
        """Return the traced results of a host call."""
        self._origins.begin()
        with DisableTorchFunction():
            tensors = self._traced(map(self._scopes.known, arguments.tensors))
            source = self._origins.current.source
            results = self._host_calls.record(cpu, arguments, tensors, source, self.on_host)
        for result in [results] if isinstance(results, torch.Tensor) else results:
            self._gradients.after_call(result)
        return results

    def _traced(self, known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return traced tensors, with constants for host tensors."""
        constant = self._scopes.constant
        return [tensor if is_traced(tensor) else constant(tensor) for tensor in known]
