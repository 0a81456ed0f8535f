"""The layers that a plan may place: modules in the order in which they run, and their ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from popsim_torch.ir import Op, Phase, Program
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.machine import Estimate

__all__ = ["Layer", "find_layers", "layer_of_ops"]


@dataclass
class Layer:
    """A module that is placed as a whole.

    Attributes:
        name: Its name in the model.
        forward: Cycles of its forward pass for one micro-batch (simulated).
        backward: Cycles of its backward pass.
        ops: The indices of its ops, in the program's order.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    ops: list[int] = field(default_factory=list)

    @property
    def cycles(self) -> float:
        """The cycles of both passes."""
        return self.forward + self.backward


def find_layers(
    model: nn.Module, program: Program, estimate: Estimate, num_ipus: int
) -> list[Layer]:
    """Return the layers of a model in the order in which they first run.

    A module whose time is more than half of an IPU's share is opened: its own modules are layers.

    Args:
        model: The model.
        program: Its program, with all ops on one stage.
        estimate: The estimate of the program.
        num_ipus: The number of IPUs to fill.
    """
    costs = estimate.by_module()
    most = (costs[""].total if "" in costs else 0.0) / (2 * num_ipus)
    started = _first_ops(program)
    names = [
        name
        for name in _opened(model, "", lambda one: one in costs and costs[one].total > most)
        if name in started
    ]
    layers = [Layer(name) for name in sorted(names, key=started.__getitem__)]
    if not layers:
        return []
    for index, layer in enumerate(layer_of_ops(program, [one.name for one in layers])):
        if layer is None:
            continue
        cost, one = estimate.ops[index], layers[layer]
        one.ops.append(index)
        if cost.phase == "forward":
            one.forward += cost.cycles
        elif cost.phase == "backward":
            one.backward += cost.cycles
    return layers


def _opened(module: nn.Module, name: str, is_large: Callable[[str], bool]) -> Iterator[str]:
    """Yield the names of modules; large ones are replaced by the modules inside of them."""
    for key, inner in module.named_children():
        path = f"{name}.{key}" if name else key
        is_list = isinstance(inner, (nn.ModuleList, nn.ModuleDict))
        opens = any(True for _ in inner.children()) and (is_list or is_large(path))
        if opens:
            yield from _opened(inner, path, is_large)
        else:
            yield path


def _scopes(op: Op) -> Iterator[str]:
    """Yield the names of the modules that call an op, the outermost first."""
    parts = op.origin.scope.split("/") if op.origin.scope else []
    for depth in range(1, len(parts) + 1):
        yield ".".join(parts[:depth])


def _first_ops(program: Program) -> dict[str, int]:
    """Return the index of the first forward op of each module that calls ops."""
    found: dict[str, int] = {}
    for index, op in enumerate(program.graph.ops):
        if op.phase == Phase.FORWARD:
            for name in _scopes(op):
                found.setdefault(name, index)
    return found


def layer_of_ops(program: Program, names: Sequence[str]) -> list[int | None]:
    """Return the layer of each op; None for ops of the update and the setup.

    A forward op outside of all layers belongs to the layer that ran last, as in a trace with
    stages. A backward op belongs to the layer of the call that it differentiates.

    Args:
        program: The program.
        names: The layers, in the order in which they run.
    """
    return _LayerFinder(program, names).find()


class _LayerFinder:
    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self._graph = program.graph
        self._place = {name: index for index, name in enumerate(names)}
        self._of_call: dict[int, int] = {}
        self._of_tensor: dict[int, int] = {}

    def find(self) -> list[int | None]:
        found: list[int | None] = []
        now = 0
        for op in self._graph.ops:
            if op.phase in (Phase.UPDATE, Phase.SETUP):
                found.append(None)
                continue
            layer = self._own(op)
            if op.phase == Phase.FORWARD:
                now = layer = self._forward(op, layer, now)
            else:
                layer = self._backward(op, layer)
            for root in self._graph.roots(op.outputs):
                self._of_tensor.setdefault(root.id, layer)
            found.append(layer)
        return found

    def _own(self, op: Op) -> int | None:
        return next((self._place[name] for name in _scopes(op) if name in self._place), None)

    def _forward(self, op: Op, layer: int | None, now: int) -> int:
        found = now if layer is None else layer
        if op.kind in ("anchor", "enqueue"):
            found = max(self._of(op.inputs), default=now)
        if op.origin.call:
            self._of_call.setdefault(op.origin.call, found)
        return found

    def _backward(self, op: Op, layer: int | None) -> int:
        known = self._of_call.get(op.origin.call)
        if known is not None:
            return known
        if layer is not None:
            return layer
        # Accumulations and sums of gradients: gradients come from later layers.
        return min(self._of(op.inputs), default=0)

    def _of(self, tensors: Iterable[int]) -> list[int]:
        roots = (self._graph.root_of(one).id for one in tensors if one != NO_TENSOR)
        return [self._of_tensor[root] for root in roots if root in self._of_tensor]
