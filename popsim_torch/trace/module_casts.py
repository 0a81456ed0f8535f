"""Conversions of modules in forward: ``module.float()``, ``.half()``, ``.to(x.device)``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.ops import op_listener
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.module_parts import own_buffers, own_parameters
from popsim_torch.private_torch.modules import CONVERSION
from popsim_torch.private_torch.tensors import pose_as_parameter
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import find_node, host_computation, is_traced

__all__ = ["converted_modules"]


def converted_modules() -> AbstractContextManager[Any]:
    """Let forward convert modules that it makes, and the model's own to the dtype they have.

    PyTorch replaces the tensors of a module, which it cannot do with traced ones.
    """
    on_host = getattr(nn.Module, CONVERSION)

    def convert(
        self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        if op_listener.get() is None:  # called by another thread, or on the host
            converted: nn.Module = on_host(self, function, recurse)
            return converted
        for child in self.children() if recurse else ():
            getattr(child, CONVERSION)(function)
        both: tuple[dict[str, Any], ...] = (own_parameters(self), own_buffers(self))
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None:
                    with torch.no_grad():
                        new = function(tensor)
                    tensors[name] = _replacement(self, name, tensor, new)
        return self

    return mock.patch.object(nn.Module, CONVERSION, convert)


def _replacement(
    module: nn.Module, name: str, tensor: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    """Return the tensor that a module has after a conversion.

    Raises:
        Error: It is a tensor of the model, and gets another dtype.
    """
    if not is_traced(tensor):  # of a module that the model does not have
        if new is not tensor and not is_traced(new):
            with DisableTorchFunction(), host_computation():
                tensor.data = new
        return tensor
    if _is_from_outside(tensor):
        if new.dtype != tensor.dtype:
            raise _refused(module, name, tensor.dtype, new.dtype)
        return tensor
    if new.device != DEVICE:  # to_empty
        new = torch.empty_like(new, device=DEVICE)
    if new.device == tensor.device:
        tensor.data = new
        return tensor
    if isinstance(tensor, nn.Parameter):
        pose_as_parameter(new)
    return new.requires_grad_(tensor.requires_grad)


def _is_from_outside(tensor: torch.Tensor) -> bool:
    """Return whether forward, or the body of a loop or branch, gets a traced tensor."""
    node = find_node(tensor)
    return node is None or node.op == "placeholder"


def _refused(module: nn.Module, name: str, before: torch.dtype, after: torch.dtype) -> Error:
    return Error(
        f"forward{user_line(' at ')} converts '{name}' of a {type(module).__name__} from {before} "
        f"to {after}. A compiled model keeps the dtypes of its parameters and buffers: convert the "
        "module before the model is wrapped."
    )
