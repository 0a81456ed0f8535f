"""Runs a module's forward once on fake device tensors, and autograd for its backward.

Nothing is computed: the tensors only have shapes and dtypes, and are on ``ipu:0``. The result is
one torch.fx graph of ATen operators, forward first, then backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from popsim_torch.arguments import OutputSpec
from popsim_torch.dtypes import held_dtype, is_continuous
from popsim_torch.enums import OverlapMode
from popsim_torch.errors import Error
from popsim_torch.ops import op_listener
from popsim_torch.private_torch.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    without_tracebacks,
)
from popsim_torch.private_torch.graph_modules import make_graph_module
from popsim_torch.private_torch.modes import function_modes
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.private_torch.proxies import record_graph
from popsim_torch.private_torch.tensors import pose_as_parameter
from popsim_torch.stages import block_listener
from popsim_torch.trace.adaptations import adapted_torch
from popsim_torch.trace.autocast import autocast_regions
from popsim_torch.trace.books.changed_in_place import explained
from popsim_torch.trace.books.device_loop import DeviceLoopBody, DeviceLoopTrace
from popsim_torch.trace.books.result import TraceRequest, TraceResult
from popsim_torch.trace.callers_values import watched_arguments
from popsim_torch.trace.conjugates import conjugate_numbers
from popsim_torch.trace.cumulative_norm import lasting_counters
from popsim_torch.trace.eager_errors import without_fakes
from popsim_torch.trace.failed_calls import (
    arguments_of_call,
    explain_failed_call,
    explain_failed_gradient,
)
from popsim_torch.trace.function_mode import FunctionMode
from popsim_torch.trace.graph.bodies import all_bodies
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.functionalise import is_mutating
from popsim_torch.trace.graph.kept_shapes import shapes_kept
from popsim_torch.trace.graph.origin import current_origin, recording
from popsim_torch.trace.graph.repeated_operators import RepeatedOperators
from popsim_torch.trace.graph.traced_tensors import TraceMode, find_node
from popsim_torch.trace.join_slices import join_slices
from popsim_torch.trace.losses import behind_hooks, find_final_loss, warn_of_numbers_behind
from popsim_torch.trace.module_state import (
    TracedState,
    attributes_kept,
    check_not_reassigned,
    with_attributes,
)
from popsim_torch.trace.overlaps import check_overlaps
from popsim_torch.trace.parameter_hooks import ParameterHooks
from popsim_torch.trace.python_types import types_of_tensors
from popsim_torch.trace.recorder import Recorder
from popsim_torch.trace.selected import check_sizes
from popsim_torch.trace.selected_calls import check_results
from popsim_torch.trace.untraceable_calls import check_all_recorded, check_traceable
from popsim_torch.trace.user_backward import observed_backward, observed_functions

_logger = logging.getLogger("poptorch::python")


def _fake(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the active fake tensor mode."""
    return torch.empty(tuple(shape), dtype=held_dtype(dtype), device=DEVICE)


class _Tracer:
    def __init__(self, request: TraceRequest) -> None:
        self._request = request
        self._mode = TraceMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        module = request.module
        self._parameters = dict(module.named_parameters())
        self._buffers = dict(module.named_buffers())
        self._names: list[str] = [*self._parameters, *self._buffers]
        self._fakes: list[torch.Tensor] = []
        self._loop: DeviceLoopTrace | None = None
        self._given: dict[str, Any] = {}
        self._result = TraceResult(
            make_graph_module({}, torch.fx.Graph()),
            self._parameters,
            self._buffers,
            len(request.inputs),
            lasting_counters(module, self._buffers)
            | frozenset(module.carried_names if isinstance(module, DeviceLoopBody) else ()),
            replica_groups=request.replica_groups,
        )
        self._recorder = Recorder(
            request.module,
            request.stages,
            self._result,
            request.module_scopes,
            request.location_excludes,
        )
        self._hooks = ParameterHooks(
            self._parameters,
            self._recorder,
            request.stages,
            request.micro_batches,
            request.mean,
        )

    def run(self) -> TraceResult:
        with self._mode:
            flat = [self._fake_parameter(name) for name in self._parameters]
            flat += [
                with_attributes(_fake(one.shape, one.dtype), one) for one in self._buffers.values()
            ]
            flat += [_fake(shape, dtype) for shape, dtype in self._request.inputs]
            if self._request.training:
                flat.append(_fake((), torch.float32))
        try:
            with (
                self._mode,
                recording(),
                without_tracebacks(),
                self._translated_errors(),
                observed_backward(self._recorder.hook),
                autocast_regions(),
            ):
                self._result.graph_module = record_graph(self._joint)(*flat)
                check_all_recorded(self._result.graph_module)
            self._drop_unused_loss_scale()
            self._check_overlaps()
            self._conjugate_numbers()
        finally:
            self._mode.is_over = True
            self._recorder.close()
        self._join_slices()
        return self._result

    def _drop_unused_loss_scale(self) -> None:
        """Remove the loss scale from the body of a loop that computes no gradients."""
        if self._loop is not None and not self._result.has_backward:
            graph = self._result.graph_module.graph
            graph.erase_node([node for node in graph.nodes if node.op == "placeholder"][-1])

    def _conjugate_numbers(self) -> None:
        """Replace conjugates of numbers, from gradients of products with ``1j``, by numbers."""
        bodies = (body.graph for body in all_bodies(self._result.controls))
        for graph in (self._result.graph_module.graph, *bodies):
            conjugate_numbers(graph)

    def _join_slices(self) -> None:
        """Join gradients of parts in the graphs that have no mutation already."""
        result = self._result
        for body in all_bodies(result.controls):
            join_slices(body.graph)
        graph = result.graph_module.graph
        if not any(map(is_mutating, graph.nodes)) and join_slices(graph):
            left = set(graph.nodes)
            partial = result.partial_gradients
            result.partial_gradients = {key: one for key, one in partial.items() if one in left}

    def _check_overlaps(self) -> None:
        marks, request = self._recorder.user_ops.overlaps, self._request
        if not marks:
            return
        graph = self._result.graph_module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        first = len(self._names)
        inputs = placeholders[first : first + len(request.inputs)]
        outputs: Any = graph.output_node().args[0]
        num_outputs = self._result.num_outputs
        check_overlaps(marks, inputs, request.input_names, outputs[:num_outputs])
        self._result.overlaps = any(mark.mode != OverlapMode.NoOverlap for mark in marks)

    def _fake_parameter(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        shape = parameter.shape[1:] if name in self._request.replica_groups else parameter.shape
        fake = with_attributes(_fake(shape, parameter.dtype), parameter)
        pose_as_parameter(fake, requires_grad=parameter.requires_grad)
        if self._request.training and is_continuous(fake.dtype):
            fake.requires_grad_(parameter.requires_grad)
        return fake

    def _joint(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        with RepeatedOperators(self._mode), types_of_tensors(self._request.module):
            return self._record(flat)

    def _record(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The recorded function: forward, then the gradients of its parameters."""
        num_state = len(self._names)
        state = dict(zip(self._names, flat[:num_state], strict=True))
        inputs = list(flat[num_state : num_state + len(self._request.inputs)])
        self._recorder.start(state)
        if self._request.body is not None:
            self._loop = self._recorder.begin_loop(
                self._request.body, {name: state[name] for name in self._parameters}, flat[-1]
            )
            self._loop.behind = self._hooks
        outputs = self._forward(state, inputs)
        self._recorder.control_flow.check(outputs)
        if self._loop is not None:
            gradients = self._end_loop(self._loop)
        else:
            training = self._request.training
            gradients = self._backward(state, flat[-1], outputs) if training else []
        self._recorder.end()
        return [*outputs, *gradients]

    def _forward(
        self, state: Mapping[str, torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        module, request = self._request.module, self._request
        by_identity = {id(t): state[n] for n, t in (self._parameters | self._buffers).items()}
        args, kwargs = request.unflatten(inputs)
        self._given = arguments_of_call(module, args, kwargs)
        named = dict(zip(request.input_names, inputs, strict=False))
        with ExitStack() as stack:
            stack.enter_context(shapes_kept({**state, **named}))
            stack.enter_context(watched_arguments(self._given, named))
            stack.enter_context(torch.set_grad_enabled(request.training))
            stack.enter_context(_context(op_listener, self._recorder.user_ops))
            stack.enter_context(_context(block_listener, request.stages))
            stack.enter_context(self._recorder.following_modules())
            stack.enter_context(observed_functions(self._recorder.after_function))
            stack.enter_context(adapted_torch())
            stack.enter_context(attributes_kept(module, self._recorder))
            if self._loop is not None:
                stack.enter_context(self._loop.active(module))
            swapped = stack.enter_context(TracedState(module, by_identity))
            self._recorder.user_ops.without_traced_state = swapped.suspended
            stack.enter_context(self._recorder.values)
            mode = partial(
                FunctionMode, self._recorder, request.training, self._mode, request.back_end
            )
            # Gradient hooks also run under a mode.
            self._recorder.user_ops.function_mode = lambda: (
                nullcontext() if _is_observed() else mode()
            )
            stack.enter_context(mode())
            self._hooks.attach(state)
            structure = module(*args, **kwargs)
            self._recorder.user_ops.end_forward()
            self._recorder.warn_of_caught_errors()
            check_not_reassigned(module, swapped.given)
            self._result.read_constants = self._recorder.values.read_constants()
        check_results(structure)
        # (host tensors that forward has written values of the device to have traced tensors)
        known = self._recorder.known
        self._result.outputs = OutputSpec(
            structure, on_device=lambda tensor: isinstance(known(tensor), FakeTensor)
        )
        return [known(tensor) for tensor in self._result.outputs.flatten(structure)]

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translate errors so that they describe the user's program, not the trace."""
        try:
            yield
        except DataDependentOutputException as error:
            raise Error(
                f"aten::item is only supported in eager mode: {error.func} needs the value of a "
                "tensor, which does not exist while the model is traced."
            ) from None
        except DynamicOutputShapeException as error:
            source = current_origin().source
            packed = "_pack_padded_sequence" in str(error.func)
            raise Error(
                f"The shape of the result of {error.func}{f' at {source}' if source else ''} "
                "depends on values, which do not exist while the model is traced. "
                + (
                    "Give the lengths as Python numbers, if they are the same in every run; or "
                    "pass the padded sequence to the recurrent layer, and mask its outputs, or "
                    "take those at the last steps with gather."
                    if packed
                    else "Use masks or torch.where, and fixed sizes."
                )
            ) from None
        except UnsupportedOperatorException as error:
            func: Any = error.func
            source = current_origin().source
            raise Error(
                f"Unsupported ops found in compiled model: [{schema_of(func).name}]"
                f"{f' at {source}' if source else ''}: PyTorch does not say which shapes its "
                "results have, or they are not dense. Use other functions, or call it on the host "
                "(poptorch.CPU)."
            ) from None
        except Exception as error:
            without_fakes(error)
            located = explained(error, current_origin().source)
            if located is not None:
                raise located from None
            check_sizes(error)
            check_traceable(error, current_origin())
            explain_failed_call(error, self._request.module, self._given)
            explain_failed_gradient(error, current_origin())
            raise

    def _end_loop(self, loop: DeviceLoopTrace) -> list[torch.Tensor]:
        """Record what the body of a loop does; return the gradients of its updates."""
        loop.finish()
        self._result.loss_dtypes = [loss.dtype for loss in loop.losses]
        nodes = map(find_node, loop.losses)
        self._result.differentiated = [node for node in nodes if node is not None]
        self._result.has_backward = loop.has_backward
        self._result.optimizers = loop.optimizers
        self._result.gradients = list(loop.gradients)
        self._result.steps = loop.steps_in_iteration
        return list(loop.gradients.values())

    def _backward(
        self,
        state: Mapping[str, torch.Tensor],
        loss_scale: torch.Tensor,
        outputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        followed = self._recorder.gradients
        left_out = [name for name, value in self._given.items() if value is None]
        loss = find_final_loss(followed.losses, followed.differentiated, left_out, outputs)
        self._result.loss_dtypes = [loss.dtype]
        if loss.grad_fn is None:
            _logger.warning(
                "trainingModel: the loss does not depend on any parameter that requires a "
                "gradient, so nothing is trained."
            )
            return []
        loss = behind_hooks(loss, outputs, followed.with_hooks)
        warn_of_numbers_behind(loss, outputs, followed.with_hooks)
        loss = followed.behind_prints(loss, outputs)
        names = [name for name in self._parameters if state[name].requires_grad]
        _check_not_accumulated({name: state[name] for name in names})
        with followed.backward_of(loss), self._recorder.values:
            seed = loss_scale.to(loss.dtype).reshape(loss.shape)
            of_batch = torch.autograd.grad(
                loss, [state[name] for name in names], seed, allow_unused=True
            )
            gradients = self._behind_accumulation(state, names, of_batch)
        found = [(n, g) for n, g in zip(names, gradients, strict=True) if g is not None]
        self._result.gradients = [name for name, _ in found]
        return [gradient for _, gradient in found]

    def _behind_accumulation(
        self,
        state: Mapping[str, torch.Tensor],
        names: Sequence[str],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Run the hooks behind the accumulation of gradients; return what updates get."""
        results = []
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and self._hooks.has_behind(name, state[name]):
                result = self._hooks.accumulate(name, state[name], gradient)
                at_once = self._request.micro_batches == 1
                if at_once and result is not None and result is not gradient:
                    result = self._recorder.gradients.changed(name, result)
                gradient = result
            results.append(gradient)
        return results


def _is_observed() -> bool:
    """Return whether a mode gets the function calls of this thread."""
    return any(isinstance(mode, FunctionMode) for mode in function_modes())


def _check_not_accumulated(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse gradients that forward itself has added to those of the loss."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise Error(
                f"forward calls backward(), which adds to the gradient of the parameter '{name}'. "
                "Use torch.autograd.grad there, or backward(inputs=[...]), and add the value "
                "to train on to the loss."
            )


@contextmanager
def _context(variable: Any, value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def trace(request: TraceRequest) -> TraceResult:
    """Trace a module.

    Args:
        request: The module and the inputs of its call.

    Returns:
        The graph and the meaning of its placeholders, results and marks. It still has mutations.

    Raises:
        Error: Forward cannot be traced, or the loss is missing, ambiguous or not a scalar.
        Exception: An exception of forward itself.
    """
    return _Tracer(request).run()
