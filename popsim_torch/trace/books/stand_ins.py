"""The traced tensors that replace host tensors: parameters, buffers, and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.fx

from popsim_torch.dtypes import is_continuous
from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.trace.books.constants import Constants
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.functionalise import is_mutating, unchanged
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import (
    find_node,
    has_memory,
    is_host_tensor,
    is_traced,
    node_of,
    unwrapped,
)

__all__ = ["StandIns"]

_OF_SHAPES = frozenset(
    {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
)


class StandIns:
    """The traced tensors of host tensors, outside of all bodies of loops and branches.

    Args:
        result: The trace; receives the data of constants.
    """

    def __init__(self, result: TraceResult) -> None:
        self._result = result
        self._by_identity: dict[int, torch.Tensor] = {}
        self._state_of: dict[torch.fx.Node, torch.Tensor] = {}
        self._memories: set[int] = set()
        self._sparse: dict[int, str] = {}  # names, by the id of the traced tensor
        self._constants = Constants(result.constants)
        # By id; the tensors are kept alive, so that no id is used twice.
        self._used: dict[int, torch.Tensor] = {}
        self._read: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, tuple[int, torch.Tensor]] = {}

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        host = {**self._result.parameters, **self._result.buffers}
        self._by_identity = {id(tensor): state[name] for name, tensor in host.items()}
        self._sparse = {
            id(state[name]): name for name, one in host.items() if one.layout is not torch.strided
        }
        self._memories = set(map(storage_key, state.values()))
        self._state_of = {node_of(tensor): tensor for tensor in state.values()}

    def close(self) -> None:
        """Forget the trace."""
        for tensors in (self._by_identity, self._state_of, self._constants, self._numbers):
            tensors.clear()
        self._sparse.clear()
        self._used.clear()
        self._read.clear()
        del self._result

    def stand_for(self, host: torch.Tensor, traced: torch.Tensor) -> None:
        """Use a traced tensor for a host tensor, which lives longer than the trace."""
        self._by_identity[id(host)] = traced

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter, buffer or changed constant, else ``tensor``.

        Raises:
            Error: The parameter or buffer is sparse.
        """
        if id(tensor) in self._sparse:
            raise self._is_sparse(self._sparse[id(tensor)])
        if id(tensor) in self._by_identity:
            return self._by_identity[id(tensor)]
        if not is_host_tensor(tensor):
            return tensor
        self._used[id(tensor)] = tensor
        changed = self._constants.changed(tensor)
        return tensor if changed is None else changed

    def _is_sparse(self, name: str) -> Error:
        host = {**self._result.parameters, **self._result.buffers}[name]
        return Error(
            f"forward{user_line(' at ')} uses '{name}', a tensor of layout {host.layout}. The "
            "device supports dense tensors only: register the result of its to_dense() instead."
        )

    def keep_host_reads(self) -> None:
        """Put the host tensors whose values forward has used into the result."""
        self._result.host_reads = [one for one in self._read.values() if has_memory(one)]
        self._result.host_writes = self._constants.changed_hosts()

    def was_used(self, host: torch.Tensor) -> bool:
        """Return whether forward has used a host tensor."""
        return id(host) in self._used

    def is_copy(self, traced: torch.Tensor, host: torch.Tensor) -> bool:
        """Return whether a traced tensor is the unchanged data of a host tensor."""
        return self._constants.is_copy(traced, host)

    def differs_in_runs(self, traced: torch.Tensor) -> bool:
        """Return whether a traced tensor depends on inputs, or on state that changes."""
        first = find_node(traced)
        todo = [] if first is None else [first]
        seen = set(todo)
        while todo:
            node = todo.pop()
            if node.op == "placeholder":
                state = self._state_of.get(node)
                if state is None or state.requires_grad or any(map(is_mutating, node.users)):
                    return True
            if _is_of_shape(node):
                continue
            new = [one for one in node.all_input_nodes if one not in seen]
            seen.update(new)
            todo += new
        return False

    def lasts(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor is a parameter or buffer, which the device keeps."""
        state = (*self._result.parameters.values(), *self._result.buffers.values())
        return any(tensor is one for one in state)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the present data of a host tensor."""
        self._used[id(tensor)] = self._read[id(tensor)] = tensor
        return self._constants.traced(tensor)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether the device has used the memory of a host tensor."""
        return self._constants.has_memory_of(tensor)

    def note_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that a call on the host gets the values of these tensors."""
        self._read.update((id(one), one) for one in tensors if is_host_tensor(one))

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer of a node; None if the node is something else."""
        return self._state_of.get(unchanged(node))

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Return whether a traced tensor is a parameter or buffer of the model."""
        return any(tensor is one for one in self._by_identity.values())

    def is_memory_of_state(self, tensor: torch.Tensor) -> bool:
        """Return whether a traced tensor has the memory that holds a parameter or buffer."""
        return storage_key(tensor) in self._memories

    def gradients_wanted(self) -> None:
        """Let parameters need gradients even if the trace needs none, in inference."""
        for parameter in self._result.parameters.values():
            traced = self._by_identity[id(parameter)]
            if is_continuous(traced.dtype):
                traced.requires_grad_(parameter.requires_grad)

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return a number that is unique among traced tensors.

        Raises:
            Error: The tensor is on the host.
        """
        if not is_traced(tensor):
            raise Error(
                f"getIpuTensorId: this tensor of shape {tuple(tensor.shape)} is on "
                f"{tensor.device}, not on the device."
            )
        tensor = unwrapped(tensor)
        number, _ = self._numbers.setdefault(id(tensor), (len(self._numbers), tensor))
        return number


def _is_of_shape(node: torch.fx.Node) -> bool:
    """Return whether a value depends on the shape of its operand only, and is not changed."""
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    return name in _OF_SHAPES and not any(
        map(is_mutating, [*node.users, *(last for one in node.users for last in one.users)])
    )
