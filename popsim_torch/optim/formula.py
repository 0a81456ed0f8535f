"""The update of an optimizer that has no update op: a graph that its own ``step`` made."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import torch
import torch.fx

__all__ = ["InitialValue", "UpdateFormula"]


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateFormula:
    """How some parameters and their states change in a step.

    The placeholders of the graph are, for each parameter, its weight, gradient and states, and then
    the hyper-parameters. Its results are, for each parameter, the new weight and the new states.

    Attributes:
        graph_module: The graph, without mutation; nodes have their value in ``meta["val"]``.
        num_parameters: Parameters of the formula (count).
        num_states: The states of each parameter (count).
        any_shape: Whether it is the same for parameters of every shape: all tensors of the graph
            have the shape of the parameter, or are numbers.
    """

    graph_module: torch.fx.GraphModule
    num_parameters: int
    num_states: tuple[int, ...]
    any_shape: bool

    @functools.cached_property
    def digest(self) -> str:
        """A text that is equal for formulas that compute the same."""
        lines = [
            f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} "
            f"{_type_of(node, shaped=not self.any_shape)}"
            for node in self.graph_module.graph.nodes
        ]
        for name, value in sorted(self.graph_module.__dict__.get("_buffers", {}).items()):
            lines.append(f"{name} {value}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _type_of(node: torch.fx.Node, *, shaped: bool) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{value.dtype} {tuple(value.shape) if shaped else value.dim() == 0}"


@dataclasses.dataclass(frozen=True, eq=False)
class InitialValue:
    """How a state begins, computed from the weight and the hyper-parameters.

    Attributes:
        graph_module: Computes the value; its placeholders are the weight and the hyper-parameters.
        values: The hyper-parameters.
    """

    graph_module: torch.fx.GraphModule
    values: tuple[float, ...] = ()

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the value for a weight, on the CPU."""
        numbers = [torch.tensor(value, dtype=torch.float64) for value in self.values]
        with torch.no_grad():
            result: torch.Tensor = self.graph_module(weight.detach().cpu(), *numbers)
        return result
