"""Assignments to ``Tensor.data`` in forward: the tensor gets the memory of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.proxies import share_node
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced

__all__ = ["assign_data"]


class Ends(Protocol):
    """The part of the tracer that knows the model's state, and where its trace ends."""

    @property
    def is_inside_of_body(self) -> bool:
        """Whether the body of a loop or branch inside of forward is being traced."""

    @property
    def loop(self) -> object | None:
        """The device loop, if its body is traced."""

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Return whether a traced tensor is a parameter or buffer of the model."""

    def is_memory_of_state(self, tensor: torch.Tensor) -> bool:
        """Return whether a traced tensor has the memory that holds a parameter or buffer."""

    def after_backward(self, ending: Callable[[], None]) -> None:
        """Call ``ending`` after forward and backward have been traced."""


def assign_data(
    tracer: Ends, setter: Callable[..., Any], target: torch.Tensor, value: torch.Tensor
) -> Any:
    """Run ``target.data = value``.

    Args:
        tracer: Knows what is being traced.
        setter: The setter of the attribute.
        target: The tensor that gets other data.
        value: The tensor that has them.

    Raises:
        Error: The program cannot express the assignment.
    """
    if not is_traced(target):
        raise Error(
            f"forward{user_line(' at ')} assigns data of the device to a tensor of the host, of "
            f"shape {tuple(target.shape)}. Make that tensor a buffer (module.register_buffer), "
            "which the device changes, or use a new tensor."
        )
    is_state = tracer.is_state(target)
    if in_transform() or tracer.is_inside_of_body or (is_state and tracer.loop is not None):
        raise Error(
            f"Assigning Tensor.data (of shape {tuple(target.shape)}) is not supported in the body "
            "of a loop or branch, and in a transform of torch.func. Use Tensor.copy_ under "
            "torch.no_grad()."
        )
    if is_state and value.shape != target.shape:
        raise Error(
            f"forward assigns data of shape {tuple(value.shape)} to a parameter or buffer of shape "
            f"{tuple(target.shape)}. A compiled model keeps its shapes: compute another tensor."
        )
    before = target.data
    result = setter(target, value)
    share_node(target, value)
    if is_state and tracer.is_memory_of_state(before):
        # The program keeps the memory of its state, so the last data are copied there.

        def write_back() -> None:
            with torch.no_grad():
                before.copy_(target)

        tracer.after_backward(write_back)
    return result
