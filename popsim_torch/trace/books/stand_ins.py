"""The traced tensors that stand for those of the host: parameters, buffers, and constants."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.trace.books.constants import Constants
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.functionalise import unchanged
from popsim_torch.trace.graph.traced_tensors import is_host_tensor, is_traced, node_of, unwrapped

__all__ = ["StandIns"]


class StandIns:
    """What stands for tensors of the host, outside of all bodies of loops and branches.

    Args:
        result: The trace; filled with the data of constants.
    """

    def __init__(self, result: TraceResult) -> None:
        self._result = result
        self._by_identity: dict[int, torch.Tensor] = {}
        self._state_of: dict[torch.fx.Node, torch.Tensor] = {}
        self._constants = Constants(result.constants)
        # By identity; the tensors are kept, so that no later one has the identity of another.
        self._numbers: dict[int, tuple[int, torch.Tensor]] = {}

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        host = {**self._result.parameters, **self._result.buffers}
        self._by_identity = {id(tensor): state[name] for name, tensor in host.items()}
        self._state_of = {node_of(tensor): tensor for tensor in state.values()}

    def close(self) -> None:
        """Forget the trace."""
        for tensors in (self._by_identity, self._state_of, self._constants, self._numbers):
            tensors.clear()
        del self._result

    def stand_for(self, host: torch.Tensor, traced: torch.Tensor) -> None:
        """Let a traced tensor stand for one of the host, which outlives the trace."""
        self._by_identity[id(host)] = traced

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a parameter, a buffer or a changed constant, else ``tensor``."""
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)]
        changed = self._constants.changed(tensor) if is_host_tensor(tensor) else None
        return tensor if changed is None else changed

    def lasts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host is a parameter or buffer, which the device keeps."""
        state = (*self._result.parameters.values(), *self._result.buffers.values())
        return any(tensor is one for one in state)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data that a host tensor has now."""
        return self._constants.traced(tensor)

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer that a node stands for, if it does."""
        return self._state_of.get(unchanged(node))

    def gradients_wanted(self) -> None:
        """Let parameters need gradients where the trace itself asks for none, in inference."""
        for parameter in self._result.parameters.values():
            traced = self._by_identity[id(parameter)]
            if traced.dtype.is_floating_point:
                traced.requires_grad_(parameter.requires_grad)

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return a number that no other traced tensor has.

        Raises:
            Error: It is a tensor of the host.
        """
        if not is_traced(tensor):
            raise Error(
                f"getIpuTensorId: this tensor of shape {tuple(tensor.shape)} is on "
                f"{tensor.device}, not on the device."
            )
        tensor = unwrapped(tensor)
        number, _ = self._numbers.setdefault(id(tensor), (len(self._numbers), tensor))
        return number
