"""Knows which tensors are traced and the nodes that compute them; can compute without a trace.

The transforms of ``torch.func`` wrap a tensor once for each level; the recorded tensor is the one
inside of all wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error, InternalError
from popsim_torch.private_torch.fake import (
    DataDependentOutputException,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)
from popsim_torch.private_torch.functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from popsim_torch.private_torch.modes import disable_current_modes
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.private_torch.proxies import get_proxy_mode, get_proxy_slot
from popsim_torch.trace.graph.device import run_for_shapes
from popsim_torch.wrapper_tensors import is_wrapper

__all__ = [
    "TraceMode",
    "current_graph",
    "find_node",
    "has_memory",
    "host_computation",
    "in_transform",
    "is_batched",
    "is_functorch_wrapped_tensor",
    "is_host_tensor",
    "is_traced",
    "node_of",
    "of_another_trace",
    "outside_transforms",
    "tensors_in",
    "unwrapped",
]

outside_transforms = temporarily_clear_interpreter_stack
"""A scope that hides calls from the transforms of ``torch.func`` around it."""


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` is active."""
    return peek_interpreter_stack() is not None


def is_traced(value: Any) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and is_fake(value)


def is_host_tensor(value: Any) -> bool:
    """Return whether a value is a tensor with data."""
    return isinstance(value, torch.Tensor) and not is_fake(value)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for one of several in ``torch.vmap``."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of the wrappers of ``torch.func``."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor has elements in its own memory or in its base's."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not is_fake(tensor)
        and not is_functorch_wrapped_tensor(tensor)
        and not is_wrapper(tensor)
        and tensor.numel() > 0
    )


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a call's arguments or results."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors_in(item)


def current_graph() -> torch.fx.Graph | None:
    """Return the graph that is being recorded."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def find_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the node that computes a tensor; None for a tensor that is not traced."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(unwrapped(tensor), mode.tracer, None)
    return None if slot is None else slot.proxy.node


def node_of(tensor: torch.Tensor) -> torch.fx.Node:
    """Return the node that computes a traced tensor."""
    node = find_node(tensor)
    if node is None:
        raise InternalError("trace: a tensor of the traced model has no node in the graph")
    return node


def of_another_trace(tensor: torch.Tensor) -> Error:
    """Return the error for a tensor that forward has kept from an earlier trace."""
    return Error(
        f"forward uses a tensor of shape {tuple(tensor.shape)} that was made during an earlier "
        "trace of this or another model; it has no values. Make it in __init__, or "
        "make a new one in each forward, instead of keeping it."
    )


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes the shapes and dtypes of a trace's tensors.

    Attributes:
        is_over: Whether the trace has ended; code that still has one of its tensors has kept it.
    """

    is_over = False

    def dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute one operator.

        Raises:
            Error: Code reads the value of a tensor that it has kept from the trace.
        """
        try:
            return super().dispatch(func, *args, **kwargs)
        except UnsupportedOperatorException as error:
            operator: Any = error.func
            if operator.namespace != "aten" or schema_of(operator).is_mutable:
                raise
            run_for_shapes(operator)
            return super().dispatch(func, *args, **kwargs)
        except DataDependentOutputException as error:
            if not self.is_over:
                raise
            raise Error(
                "Code reads the value of a tensor that was made in the body of a loop, or in "
                "forward, and kept (in a list, or an attribute). That code ran once, during the "
                "trace, and the tensor never had a value. Return the tensor, or send the values of "
                "every iteration to the host with OutfeedQueue.enqueue."
            ) from error


@contextmanager
def host_computation() -> Iterator[None]:
    """Compute with host tensors in this scope, without trace and transforms."""
    with outside_transforms(), disable_current_modes():
        yield
