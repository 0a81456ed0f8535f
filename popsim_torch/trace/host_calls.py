"""Calls of host functions: their operators, and the recording of a call in ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name, held_dtype
from popsim_torch.errors import Error
from popsim_torch.host_call import CPU, CallArguments, HostCall, TensorType
from popsim_torch.private_torch.modes import without_function_modes
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import (
    find_node,
    host_computation,
    in_transform,
    of_another_trace,
)
from popsim_torch.trace.own_operators import define_with_gradient

__all__ = ["HOST_CALL", "HOST_CALL_GRAD", "HostCalls", "on_host"]

_SCHEMAS = (
    "host_call(Tensor[] inputs, int call, str id, str[] results, bool[] wanted, "
    "bool[] differentiable) -> Tensor[]",
    "host_call_grad(Tensor[] gradients, Tensor[] inputs, Tensor random_state, int call, str id, "
    "bool[] wanted) -> Tensor[]",
)


def _described(result: TensorType) -> str:
    """Return dtype and sizes of a result, as the operator takes them."""
    return " ".join(map(str, (dtype_name(held_dtype(result.dtype)), *result.shape)))


def _host_call(
    _inputs: object, _call: int, _id: str, results: Sequence[str], *_flags: object
) -> list[torch.Tensor]:
    """Return empty results; with a gradient to come, the last one is the random number state."""
    found = []
    for result in results:
        dtype, *sizes = result.split()
        shape = [int(size) for size in sizes]
        found.append(torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE))
    return found


def _host_call_grad(
    _gradients: object,
    inputs: Sequence[torch.Tensor],
    _random_state: object,
    _call: object,
    _id: object,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    tensors, ctx.call, ctx.id, _, ctx.wanted, ctx.differentiable = inputs
    ctx.set_materialize_grads(True)
    *results, random_state = output
    ctx.mark_non_differentiable(
        *(x for x, is_one in zip(results, ctx.differentiable, strict=True) if not is_one),
        random_state,
    )
    ctx.save_for_backward(*tensors, random_state)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    of_results = zip(gradients[:-1], ctx.differentiable, strict=True)
    *inputs, random_state = ctx.saved_tensors
    found = iter(
        torch.ops.popsim.host_call_grad(
            [x for x, is_one in of_results if is_one],
            inputs,
            random_state,
            ctx.call,
            ctx.id,
            ctx.wanted,
        )
    )
    of_inputs = [next(found) if is_wanted else None for is_wanted in ctx.wanted]
    return (of_inputs, None, None, None, None, None)


# The operators exist as long as this object.
_library = define_with_gradient(
    "host_call",
    _SCHEMAS,
    (_host_call, _host_call_grad),
    _backward,
    _keep_for_backward,
    "poptorch.CPU: torch.autograd.grad(..., create_graph=True) through its call.",
)

HOST_CALL = torch.ops.popsim.host_call.default
HOST_CALL_GRAD = torch.ops.popsim.host_call_grad.default


@contextmanager
def on_host() -> Iterator[None]:
    """Compute without the modes of the trace in this scope; forward runs under these modes."""
    with without_function_modes(), host_computation(), torch.inference_mode(False):
        yield


class HostCalls:
    """The host calls of one ``forward``.

    Args:
        calls: Receives them, by number.
    """

    def __init__(self, calls: dict[int, HostCall]) -> None:
        self._calls = calls
        self._objects: dict[str, CPU] = {}
        self._inputs: dict[str, tuple[TensorType, ...]] = {}

    def record(
        self,
        cpu: CPU,
        arguments: CallArguments,
        tensors: Sequence[torch.Tensor],
        source: str,
        on_host: Callable[[], AbstractContextManager[None]],
    ) -> torch.Tensor | list[torch.Tensor]:
        """Put a call into the graph.

        Args:
            cpu: The object that forward calls.
            arguments: The arguments of the call.
            tensors: The traced tensors among the arguments.
            source: The line of the call.
            on_host: A scope that runs code as outside of the trace.

        Returns:
            The traced results.

        Raises:
            Error: It differs from an earlier call with the same ID, or the callable does not return
                tensors.
            BaseException: The exception of the callable.
        """
        if in_transform():
            raise Error(
                f"poptorch.CPU '{cpu._ID}' is called{user_line(' at ')} inside of a transform of "
                "torch.func (grad, vmap, ...), which cannot follow what the host does. Call it "
                "outside of the transform."
            )
        for tensor in tensors:
            if find_node(tensor) is None:
                raise of_another_trace(tensor)
        types = tuple(map(TensorType.of, tensors))
        self._check(cpu, types)
        wanted = tuple(x.requires_grad and torch.is_grad_enabled() for x in tensors)
        known = self._known(cpu, arguments, wanted)
        if known is not None:
            call = known.at(source)
        else:
            rest = arguments.without_tensors()
            call = HostCall(cpu._ID, cpu._layer_to_call, rest, source, wanted)
            with on_host():
                call.try_with_zeros(types)
        number = len(self._calls)
        self._calls[number] = call
        if call.has_gradient:
            # Forward may change them in place later. Copies cost nothing in a program.
            given = list(map(_kept, tensors))
        else:
            given = [x.detach() if x.requires_grad else x for x in tensors]
        results: list[torch.Tensor] = torch.ops.popsim.host_call(
            given,
            number,
            call.ID,
            [_described(result) for result in call.all_results],
            list(wanted),
            list(call.differentiable),
        )
        return results[: len(call.results)] if call.is_list else results[0]

    def _check(self, cpu: CPU, types: tuple[TensorType, ...]) -> None:
        """Check that an ID belongs to one object, and always has inputs of the same types."""
        if self._objects.setdefault(cpu._ID, cpu) is not cpu:
            raise Error(
                f"poptorch.CPU '{cpu._ID}' is called{user_line(' at ')}, but forward has called "
                "another object with this ID. Give each poptorch.CPU its own ID, or call "
                "one object several times."
            )
        known = self._inputs.setdefault(cpu._ID, types)
        if known != types:
            raise Error(
                f"poptorch.CPU '{cpu._ID}' is called{user_line(' at ')} with "
                f"{', '.join(map(str, types))}, but was called with "
                f"{', '.join(map(str, known))} before. Shapes and dtypes must be the same "
                "in all calls of one object: make another poptorch.CPU with its own ID."
            )

    def _known(
        self, cpu: CPU, arguments: CallArguments, wanted: tuple[bool, ...]
    ) -> HostCall | None:
        """Return an earlier call with such arguments and known results; None if there is none."""
        for call in self._calls.values():
            if (
                call.ID == cpu._ID
                and call.wanted == wanted
                and call.arguments.has_same_rest(arguments)
            ):
                return call
        return None


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, with its gradient."""
    # PyTorch has no gradient of the first one for complex numbers.
    copy = torch.ops.aten.clone if tensor.is_complex() else torch.ops.aten.lift_fresh_copy
    kept: torch.Tensor = copy(tensor)
    return kept
