"""The host tensors that forward uses: constants of the program, with their present data."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

import torch

from popsim_torch.dtypes import held_dtype
from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import version_of
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import (
    has_memory,
    host_computation,
    is_functorch_wrapped_tensor,
    outside_transforms,
)
from popsim_torch.wrapper_tensors import is_wrapper

_logger = logging.getLogger("poptorch::python")


@dataclass(frozen=True)
class _Constant:
    """A host tensor and its traced tensor, each with its version at that time.

    The reference keeps the host tensor alive, so that its memory is not reused.
    """

    host: torch.Tensor
    host_version: int
    traced: torch.Tensor
    traced_version: int

    def stands_for(self, tensor: torch.Tensor) -> bool:
        return self.host is tensor and self.host_version == version_of(tensor)

    def is_changed(self) -> bool:
        return version_of(self.traced) != self.traced_version

    def covers_as(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor in the same memory has the same elements of it."""
        host = self.host
        return (
            host.dtype == tensor.dtype
            and host.shape == tensor.shape
            and host.stride() == tensor.stride()
            and host.storage_offset() == tensor.storage_offset()
        )


class Constants:
    """Makes traced tensors for host tensors.

    The host tensors are never changed. A change in place in forward changes the traced tensor,
    which replaces the host tensor from then on.

    Args:
        data: Receives a copy of each host tensor's data.
    """

    def __init__(self, data: list[torch.Tensor]) -> None:
        self._data = data
        self._by_memory: defaultdict[int, list[_Constant]] = defaultdict(list)

    def changed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the traced tensor for a host tensor that forward has changed; None for others.

        Raises:
            Error: Forward has changed another part or view of the same memory.
        """
        if not self._by_memory or not has_memory(tensor):
            return None
        for constant in self._by_memory.get(tensor.untyped_storage().data_ptr(), ()):
            if constant.is_changed():
                if constant.covers_as(tensor):
                    return constant.traced
                raise Error(
                    f"forward{user_line(' at ')} uses a host tensor of shape "
                    f"{tuple(tensor.shape)} after values of the device were written to a tensor "
                    "that shares its memory. Make a copy on the device first and work with that: "
                    "table = self.table.to(x.device)."
                )
        return None

    def traced(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the present data of a host tensor.

        Raises:
            Error: The host tensor is sparse, consists of other tensors, or is wrapped by a
                transform of ``torch.func``.
        """
        if tensor.layout is not torch.strided:
            raise Error(
                f"forward{user_line(' at ')} uses a host tensor of layout {tensor.layout}. "
                "The device supports dense tensors only: use tensor.to_dense()."
            )
        if is_wrapper(tensor):
            raise Error(
                f"forward{user_line(' at ')} uses a {type(tensor).__name__}, which consists of "
                "other tensors. Use those tensors."
            )
        if is_functorch_wrapped_tensor(tensor):
            raise Error(
                f"forward{user_line(' at ')} combines a tensor of the device with a host tensor "
                "that a transform of torch.func works on. Move the host tensor to the device "
                "before the transform: tensor.to(x.device)."
            )
        known = self._by_memory[tensor.untyped_storage().data_ptr()]
        for constant in known:
            if constant.stands_for(tensor):
                return constant.traced
        with host_computation():
            data = tensor.detach().resolve_conj().resolve_neg()
            data = data.clone(memory_format=torch.contiguous_format)
            data = data.to(held_dtype(tensor.dtype))
        if data.dtype != tensor.dtype:
            _logger.warning(
                "forward%s uses a tensor of %s, which the device holds as %s.",
                *(user_line(" at "), tensor.dtype, data.dtype),
            )
        self._data.append(data)
        with outside_transforms():
            traced = torch.ops.popsim.constant(
                list(tensor.shape), data.dtype, len(self._data) - 1, DEVICE
            )
        known.append(_Constant(tensor, version_of(tensor), traced, version_of(traced)))
        result: torch.Tensor = traced
        return result

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor in the memory of a host tensor is a constant."""
        return has_memory(tensor) and tensor.untyped_storage().data_ptr() in self._by_memory

    def is_copy(self, traced: torch.Tensor, host: torch.Tensor) -> bool:
        """Return whether a traced tensor is the unchanged data of a host tensor."""
        return any(
            constant.traced is traced and constant.stands_for(host) and not constant.is_changed()
            for constants in self._by_memory.values()
            for constant in constants
        )

    def changed_hosts(self) -> list[torch.Tensor]:
        """Return the host tensors that the device changes a copy of."""
        known = self._by_memory.values()
        return [one.host for constants in known for one in constants if one.is_changed()]

    def clear(self) -> None:
        """Forget all tensors."""
        self._data = []
        self._by_memory.clear()
