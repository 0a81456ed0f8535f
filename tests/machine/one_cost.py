"""What one op costs, without memory for its tensors: sizes may be as large as they like."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from popsim_torch import _native, ir
from popsim_torch.passes.native_graph import to_native

F16, F32 = torch.float16, torch.float32
CONSTANTS = {one.name: one.value for one in _native.machine_constants()}
SYNC, GLUE = CONSTANTS["sync"], CONSTANTS["glue"]
WORKERS = 6
MILLION = 1_000_000
# Of a million elements over 1472 tiles, those of one worker of the fullest tile: 680 of a tile.
OWN = 114


class OneCost:
    """A graph with one op in it."""

    def __init__(self) -> None:
        self.graph = ir.Graph()

    def value(self, dtype: torch.dtype, *shape: int) -> ir.Tensor:
        """Add a tensor that an op writes."""
        return self.graph.add_tensor(ir.TensorKind.VALUE, dtype, shape)

    def variable(self, dtype: torch.dtype, *shape: int) -> ir.Tensor:
        """Add a weight."""
        return self.graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape)

    def cost(
        self,
        kind: str,
        inputs: Sequence[ir.Tensor | None],
        outputs: Sequence[ir.Tensor | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        device: _native.MachineDevice | None = None,
        phase: ir.Phase = ir.Phase.FORWARD,
    ) -> Any:
        """Add the op and return its cost on a device, by default a Bow."""
        self.graph.add_op(kind, inputs, outputs, attributes or {}, phase=phase, name="it")
        return cost_of(self.graph, device)


def cost_of(graph: ir.Graph, device: _native.MachineDevice | None = None) -> Any:
    """Return the cost of the last op of a graph."""
    with _native.translated_errors():
        return _native.op_cost(
            to_native(graph), len(graph.ops) - 1, device or _native.MachineDevice(21)
        )


def map_cost(
    code: Sequence[str],
    inputs: Sequence[tuple[torch.dtype, Sequence[int]]],
    output: tuple[torch.dtype, Sequence[int]],
    *,
    constants: Sequence[float] = (),
    device: _native.MachineDevice | None = None,
) -> Any:
    """Return the cost of a map of tensors that are contiguous."""
    program = OneCost()
    out = program.value(output[0], *output[1])
    attributes = {
        "code": list(code),
        "constants": list(constants),
        "results": [len(inputs) + len(constants) + len(code) - 1],
        "dtypes": [str(output[0]).removeprefix("torch.")],
        "shape": list(output[1]),
    }
    operands = [program.value(dtype, *shape) for dtype, shape in inputs]
    return program.cost("map", operands, [out], attributes, device=device)


def device_with(tiles: int) -> _native.MachineDevice:
    """Return a Bow with another number of tiles."""
    device = _native.MachineDevice(21)
    device.tiles = tiles
    return device


def parts_of(cost: Any) -> tuple[Any, ...]:
    """Return all that a cost says."""
    return (
        *(cost.compute, cost.exchange, cost.sync, cost.glue, cost.temporary_bytes),
        *(cost.exchanges, cost.grade, cost.formula, cost.plan),
    )


def worker(overhead: float, cycles: float, elements: int, *, own: int = OWN) -> float:
    """Return the cycles of six workers that each treat ``own`` elements, by hand."""
    return WORKERS * (overhead + -(-own // elements) * cycles)
