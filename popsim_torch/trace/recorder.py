"""Keeps the books while forward is traced: scopes, origins, losses, prints, gradient names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from popsim_torch.custom_ops.registry import CustomCall
from popsim_torch.enums import OverlapMode
from popsim_torch.errors import Error
from popsim_torch.host_call import CPU, CallArguments
from popsim_torch.ir import Origin
from popsim_torch.ops import PrintFormat, op_listener
from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.changed_in_place import explained
from popsim_torch.trace.constants import Constants
from popsim_torch.trace.control.cut import unchanged
from popsim_torch.trace.control.flow import ControlFlow
from popsim_torch.trace.custom import custom_results
from popsim_torch.trace.gradient_uses import watch_uses
from popsim_torch.trace.graph.enqueues import Sums, record_enqueue
from popsim_torch.trace.graph.markers import PrintedTensor, mark
from popsim_torch.trace.graph.origin import (
    note_gradient,
    note_hook,
    origin_kept,
    set_origin,
    user_line,
)
from popsim_torch.trace.graph.traced_tensors import (
    current_graph,
    find_node,
    is_functorch_wrapped_tensor,
    is_host_tensor,
    is_traced,
    node_of,
    unwrapped,
)
from popsim_torch.trace.host_calls import HostCalls, on_host
from popsim_torch.trace.known_values import KnownValues
from popsim_torch.trace.loop_body import BodyRequest, LoopTrace
from popsim_torch.trace.overlaps import OverlapMark
from popsim_torch.trace.regions import Regions
from popsim_torch.trace.result import PrintRequest, TraceResult
from popsim_torch.trace.scopes import Scopes

# Answered from a tensor's metadata: no operation on the device.
_METADATA = frozenset(
    {"size", "dim", "element_size", "numel", "stride", "is_floating_point", "is_complex", "type"}
)


class Recorder:
    """Listens to function calls, module calls and the operations of ``popsim_torch.ops``.

    Args:
        module: The module being traced.
        stages: Tells the stage of what is called now.
        result: Filled with constants, prints and gradient marks.
        module_scopes: Put module paths into scopes.
        location_excludes: Pieces of paths of files whose lines are no origin.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: StageAssigner,
        result: TraceResult,
        module_scopes: bool,
        location_excludes: Sequence[str] = (),
    ) -> None:
        self._location_excludes = location_excludes
        self._result = result
        self._stages = stages
        # Another thread, or code that forward calls on the host, may call modules as well.
        self._scopes = Scopes(
            module if module_scopes else None, is_followed=lambda: op_listener.get() is self
        )
        self._origin = Origin()
        self._in_backward = False
        self._graph: torch.fx.Graph | None = None
        self._keys = itertools.count()
        self._calls = itertools.count(1)
        self._known: dict[int, torch.Tensor] = {}
        # By identity; the tensors are kept, so that no later one has the identity of another.
        self._tensor_ids: dict[int, tuple[int, torch.Tensor]] = {}
        self._constants = Constants(result.constants)
        self._control_flow = ControlFlow(self, result.controls)
        self._depth_of_bodies = 0
        self._loop: LoopTrace | None = None
        self._sums: Sums | None = None
        self._state_of: dict[torch.fx.Node, torch.Tensor] = {}
        self.values = KnownValues(result.constants, self.constant)
        self._regions = Regions()
        self.overlaps: list[OverlapMark] = []
        # Autograd nodes seen so far; kept, because their identity is what counts.
        self._seen: set[Any] = set()
        self._hooked: set[tuple[Any, int]] = set()
        self._host_calls = HostCalls(result.host_calls)
        # Puts the host's parameters and buffers back into the module for a scope.
        self.without_traced_state: Callable[[], AbstractContextManager[None]] = nullcontext
        self._endings: list[Callable[[], None]] = []
        self.losses: list[torch.Tensor] = []
        # Prints with gradient: the tensor, and what stands for it behind the print.
        self._printed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.differentiated: list[torch.Tensor] = []

    def begin_loop(
        self, request: BodyRequest, parameters: Mapping[str, torch.Tensor], scale: torch.Tensor
    ) -> LoopTrace:
        """Take note that what is traced is the body of a device loop."""
        self._loop = LoopTrace(
            request, parameters, self.known, self.backward_of, self.begin_call, scale
        )
        return self._loop

    def stand_for(self, host: torch.Tensor, traced: torch.Tensor) -> None:
        """Let a traced tensor stand for one of the host, which outlives the trace."""
        self._known[id(host)] = traced

    @property
    def loop(self) -> LoopTrace | None:
        """The device loop whose body is traced."""
        return self._loop

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        self._graph = current_graph()
        host = {**self._result.parameters, **self._result.buffers}
        constants = filter(self._result.is_constant, host)
        self.values.start(
            self._graph, {node_of(state[name]): (name, host[name]) for name in constants}
        )
        self._known = {id(tensor): state[name] for name, tensor in host.items()}
        self._state_of = {node_of(tensor): tensor for tensor in state.values()}
        for name in self._result.parameters:
            if state[name].requires_grad:
                key = next(self._keys)
                self._result.parameter_of[key] = name
                self._mark_gradient(state[name], key)

    def close(self) -> None:
        """Forget the trace.

        Autograd's nodes hold hooks that hold this object, where the garbage collector cannot see
        it: what is kept here would be kept for ever.
        """
        for seen in (self._seen, self._hooked, self.losses, self.differentiated, self.overlaps):
            seen.clear()
        self._printed.clear()
        for tensors in (self._known, self._tensor_ids, self._constants, self.values):
            tensors.clear()
        self._state_of.clear()
        del self._result, self._graph, self._host_calls, self.without_traced_state, self._loop

    # Function calls (FunctionListener)

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``.

        In a body it is what stands there for the tensor.
        """
        if id(tensor) in self._known:
            tensor = self._known[id(tensor)]
        elif is_host_tensor(tensor):
            changed = self._constants.changed(tensor)
            tensor = tensor if changed is None else changed
        return self._control_flow.bodies.inside(tensor)

    def seen_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor for what stands for it in a body."""
        return self._control_flow.bodies.outside(tensor)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data that a host tensor has now."""
        calling = self._origin
        self._set_origin("Constant")
        try:
            return self._control_flow.bodies.inside(self._constants.traced(tensor))
        finally:
            self._origin = calling
            set_origin(calling)

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a traced tensor; None if they are those of a run."""
        return self.values.find(tensor)

    def gradients_wanted(self) -> None:
        """Let parameters need gradients where the trace itself asks for none, in inference."""
        for parameter in self._result.parameters.values():
            traced = self._known[id(parameter)]
            if traced.dtype.is_floating_point:
                traced.requires_grad_(parameter.requires_grad)

    def before_call(self, function: Callable[..., Any]) -> None:
        """Take note of where the nodes made next come from."""
        if getattr(function, "__name__", "") not in _METADATA:
            self._set_origin(multi_conv=self._regions.group_of(function))

    def after_call(self, result: torch.Tensor) -> None:
        """Ask for the gradient of a differentiable result, and follow its way back."""
        result = unwrapped(result)
        if not result.requires_grad or result.grad_fn is None:
            return
        if current_graph() is not self._graph:
            return  # traced on its own, by torch.func.linearize
        place = (result.grad_fn, result.output_nr)
        if place in self._hooked:
            return
        self._hooked.add(place)
        key = next(self._keys)
        self._mark_gradient(result, key)
        if self._depth_of_bodies:  # its gradient is the body's, and its node will be cut out
            note_gradient(node_of(result), key)
            return
        self._result.forward_of[key] = node_of(result)
        self._follow(result.grad_fn)

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a user's hook of a gradient: it may enqueue and print, as forward may."""

        def called(*gradients: Any) -> Any:
            # Autograd calls it in a thread of its own.
            token, origin = op_listener.set(self), self._origin
            try:
                with origin_kept():
                    return function(*gradients)
            finally:
                self._origin = origin
                op_listener.reset(token)

        return called

    def mark_loss(self, loss: torch.Tensor) -> None:
        """Take note of a loss; what a transform of ``torch.func`` works on is not the model's."""
        if not is_functorch_wrapped_tensor(loss):
            self.losses.append(loss)
            node = find_node(loss)
            if node is not None:
                self._result.losses.append(node)

    def mark_differentiated(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take note of tensors whose gradients forward computes itself."""
        self.differentiated.extend(outputs)

    # Operations of user code (OpListener)

    def print_tensor(
        self, tensor: torch.Tensor, title: str, print_gradient: bool, text_format: PrintFormat
    ) -> torch.Tensor:
        """Return ``tensor``, printed at run time."""
        self._set_origin("PrintTensor")
        tensor = self.known(tensor)
        key = next(self._keys)
        self._result.prints[key] = PrintRequest(title, None, text_format)
        gradient_key = None
        if print_gradient:
            gradient_key = next(self._keys)
            self._result.prints[gradient_key] = PrintRequest(title, key, text_format)
        result: torch.Tensor = PrintedTensor.apply(tensor, key, gradient_key)  # type: ignore[no-untyped-call]
        self.after_call(result)
        if print_gradient:
            self._printed.append((tensor, result))
        return result

    def behind_prints(self, loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a loss as its last print hands it on: the gradient comes from there.

        A print whose result nobody uses is none.
        """
        nodes = {find_node(output) for output in outputs}
        for tensor, result in self._printed:
            node = find_node(result)
            if tensor is loss and node is not None and (node.users or node in nodes):
                loss = result
        return loss

    def at_end(self, ending: Callable[[], None]) -> None:
        """Call ``ending`` when all of forward has been traced."""
        self._endings.append(ending)

    def end_forward(self) -> None:
        """Take note that all of forward has been traced."""
        for ending in self._endings:
            ending()
        self._endings.clear()

    def enqueue(self, queue: Any, structure: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Put an element of a queue into the program."""
        self._set_origin("Enqueue")
        known = list(map(self.known, tensors))
        with DisableTorchFunction():
            given = [tensor if is_traced(tensor) else self.constant(tensor) for tensor in known]
            record_enqueue(
                self._result.enqueues, queue, structure, given, self._origin.source, self._sums
            )
        graph = current_graph()
        if self._in_backward and graph is not None:
            note_hook(graph._root.prev)

    @contextmanager
    def summed_elements(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Put sums over the micro-batches of a weight update into queues, in this scope."""
        outer, self._sums = self._sums, Sums(dtype)
        try:
            yield
        finally:
            self._sums = outer

    def identity_loss(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the reduced tensor, marked as a loss."""
        self._set_origin("IdentityLoss")
        tensor = self.known(tensor)
        with DisableTorchFunction():
            reduced = (
                tensor.view_as(tensor) if reduction == "none" else getattr(tensor, reduction)()
            )
        self.after_call(reduced)
        self.mark_loss(reduced)
        return reduced

    def custom_op(self, inputs: Sequence[torch.Tensor], call: CustomCall) -> list[torch.Tensor]:
        """Return the results of a custom operator."""
        given = [self.known(one) if is_host_tensor(one) else one for one in inputs]
        given = [self.constant(one) if is_host_tensor(one) else one for one in given]
        self._set_origin(call.name)
        with DisableTorchFunction():
            results = custom_results(call, given)
        for result in results:
            self.after_call(result)
        return results

    def checkpoint(self, tensor: torch.Tensor) -> None:
        """Take note of a value to keep for the backward pass; data of the host is kept anyway."""
        tensor = self.known(tensor)
        if isinstance(tensor, FakeTensor):
            self._result.checkpoints.append(node_of(tensor))

    def rebuilt_region(self) -> AbstractContextManager[None]:
        """Let the backward pass rebuild what is computed in the scope."""
        return self._regions.rebuilding()

    def multi_conv(self, check: Callable[[int], None]) -> AbstractContextManager[None]:
        """Group the convolutions in the scope; ``check`` is told how many there were."""
        return self._regions.multi_conv(check)

    def overlap(self, tensor: torch.Tensor, mode: OverlapMode, *, for_input: bool) -> torch.Tensor:
        """Return another tensor with the values of ``tensor``, and take note of both."""
        self._set_origin()
        tensor = self.known(tensor)
        if not is_traced(tensor):
            self.overlaps.append(OverlapMark(None, None, mode, for_input))
            return tensor
        with DisableTorchFunction():
            result = torch.ops.aten.alias.default(tensor)
        self.overlaps.append(OverlapMark(node_of(tensor), node_of(result), mode, for_input))
        self.after_call(result)
        return result  # type: ignore[no-any-return]

    def name_scope(self, name: str) -> AbstractContextManager[None]:
        """Put ``name`` behind the current scope."""
        return self._scopes.named(name)

    def following_modules(self) -> AbstractContextManager[None]:
        """Keep the scope that of the modules being called."""
        return self._scopes.following_modules()

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Return a number that no other tensor of this trace has."""
        tensor = self.known(tensor)
        if not is_traced(tensor):
            raise Error(
                f"getIpuTensorId: this tensor of shape {tuple(tensor.shape)} is on "
                f"{tensor.device}, not on the device."
            )
        tensor = unwrapped(tensor)
        number, _ = self._tensor_ids.setdefault(id(tensor), (len(self._tensor_ids), tensor))
        return number

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

    # Loops and branches (BodyListener)

    @property
    def control_flow(self) -> ControlFlow:
        """Return what records loops and branches."""
        return self._control_flow

    @property
    def is_inside_of_body(self) -> bool:
        """Whether what is traced now is the body of a loop or branch inside of forward."""
        return self._depth_of_bodies > 0

    @contextmanager
    def inside_of_body(self) -> Iterator[None]:
        """Take note of no losses and gradients in this scope: they are not the model's."""
        lists: list[list[Any]] = [self.losses, self.differentiated]
        lists += [self._result.losses, self._result.checkpoints]
        lengths = [len(items) for items in lists]
        self._depth_of_bodies += 1
        try:
            yield
        finally:
            self._depth_of_bodies -= 1
            for items, length in zip(lists, lengths, strict=True):
                del items[length:]

    @contextmanager
    def gradient_of_body(self) -> Iterator[None]:
        """Take note that the nodes made in this scope belong to the gradient of a body."""
        set_origin(replace(self._origin, backward=True, op_type=None))
        before, self._in_backward = self._in_backward, True
        try:
            yield
        except RuntimeError as error:
            located = explained(error, user_line(excludes=("contextlib.py",)))
            if located is None:
                raise
            raise located from error
        finally:
            self._in_backward = before
            set_origin(self._origin)

    def forget(self, gone: set[torch.fx.Node], last: torch.fx.Node) -> None:
        """Forget nodes that were taken out of the graph; ``last`` stood in front of them."""
        self.values.forget(gone, last)

    def begin_call(self, op_type: str) -> None:
        """Take note that the nodes made next are the user's call of an op of this type."""
        self._set_origin(op_type)

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer that a node stands for, if it does."""
        state = self._state_of.get(unchanged(node))
        return None if state is None else self.known(state)

    # Calls of the host

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Run code as outside of the trace: on the host's tensors, with nothing recorded."""
        with on_host(), self.without_traced_state():
            yield

    def host_call(self, cpu: CPU, arguments: CallArguments) -> torch.Tensor | list[torch.Tensor]:
        """Return the traced results of a call of the host."""
        self._set_origin()
        with DisableTorchFunction():
            known = map(self.known, arguments.tensors)
            tensors = [tensor if is_traced(tensor) else self.constant(tensor) for tensor in known]
            source = self._origin.source
            results = self._host_calls.record(cpu, arguments, tensors, source, self.on_host)
        for result in [results] if isinstance(results, torch.Tensor) else results:
            self.after_call(result)
        return results

    # Backward

    @contextmanager
    def backward_of(self, loss: torch.Tensor) -> Iterator[None]:
        """Run a backward pass that starts at ``loss``."""
        self._follow(loss.grad_fn)
        watch_uses(loss.grad_fn, self._note_use)
        set_origin(replace(self._origin, backward=True, op_type=None))
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _note_use(self, position: int, operand: int, gradient: torch.Tensor) -> None:
        """Take note of what one use of a tensor adds to its gradient."""
        node = find_node(gradient) if self._in_backward else None
        if node is not None:
            self._result.partial_gradients[position, operand] = node

    def _set_origin(self, op_type: str | None = None, multi_conv: int = 0) -> None:
        source = user_line(excludes=self._location_excludes)
        self._origin = Origin(
            self._scopes.current,
            self._stages.current_stage(),
            self._in_backward or (self._loop is not None and self._loop.has_backward),
            op_type,
            source,
            next(self._calls),
            self._regions.rebuilt,
            multi_conv,
        )
        set_origin(self._origin)

    def _mark_gradient(self, tensor: torch.Tensor, key: int) -> None:
        """Let the gradient of a tensor carry a name; not one that forward itself computes."""

        def named(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None or not self._in_backward:
                return None
            return mark(gradient, key)

        tensor.register_hook(named)  # type: ignore[no-untyped-call]

    def _follow(self, node: Any) -> None:
        """Let the backward of the current call carry its origin.

        Gradients that forward itself computes (``torch.autograd.grad``) belong to forward.
        """
        origin = replace(self._origin, backward=True, op_type=None)

        def before(_gradients: object) -> None:
            if self._in_backward:
                set_origin(origin)

        todo = [node]
        while todo:
            current = todo.pop()
            if current is None or current in self._seen or hasattr(current, "variable"):
                continue
            self._seen.add(current)
            current.register_prehook(before)
            todo.extend(following for following, _ in current.next_functions)
