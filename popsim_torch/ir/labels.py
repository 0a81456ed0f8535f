"""The names of ops for people: the result of the user's call, and the module that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from popsim_torch.ir.graph import Op, Phase
from popsim_torch.ir.program import Program

__all__ = ["OpLabels"]


class OpLabels:
    """The names of a program's ops.

    Args:
        program: The program whose ops are named.
        others: Other versions of it, which know the names of more calls.
    """

    def __init__(self, program: Program, others: Sequence[Program] = ()) -> None:
        self._graph = program.graph
        self._forward: dict[int, str] = {}
        for one in (*others, program):
            for op in one.graph.ops:
                if op.phase == Phase.FORWARD and op.origin.call and op.name:
                    self._forward.setdefault(op.origin.call, op.name)
        kept = {**program.parameters, **program.buffers, **program.states}
        # A state is named after its parameter: Accum___fc.weight.
        self._owners = {tensor: name.rpartition("___")[2] for name, tensor in kept.items()}

    def name(self, op: Op) -> str:
        """Return the name of an op's result, or of the forward op that it differentiates."""
        if op.phase != Phase.BACKWARD or not op.origin.scope or op.name in self._graph.names:
            return op.name
        return f"backward of {self._forward.get(op.origin.call, op.origin.scope)}"

    def layer(self, op: Op) -> str:
        """Return the module that an op belongs to; empty for none or several."""
        if op.origin.scope:
            return op.origin.scope.replace("/", ".")
        if op.origin.call:
            return ""
        bases = (self._graph.tensors[one].base for one in op.inputs + op.outputs if one >= 0)
        tensors = {*op.inputs, *op.outputs, *bases}
        layers = {
            self._owners[tensor].rpartition(".")[0] for tensor in tensors if tensor in self._owners
        }
        return layers.pop() if len(layers) == 1 else ""
