"""Runs a program that is one op of the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from popsim_torch import _native, ir
from popsim_torch.passes.native_graph import to_native
from tests.reference.agree import assert_as_reference

Type = tuple[torch.dtype, Sequence[int]]


class OneOp:
    """One op on tensors that keep their values and strides.

    Its first run is compared with what the reference interpreter gives for it, so every test of an
    op has that expectation beside its own.

    Args:
        kind: Name in the op registry.
        inputs: None for one that is left out.
        outputs: Element type and shape that each result has in eager PyTorch, as the op's shape
            rule must say, too; None for a result that nobody reads; the position of the input that
            it overwrites.
        attributes: Of the op.
        has_reference: Whether the first run is compared. Not so where the kernel is free to round
            on the way, and where another test compares the same op on the same operands.

    Attributes:
        graph: The program.
        memory: What the memory of the inputs holds, by the tensor that owns it.
        outputs: The op's, None for one that is left out.
    """

    def __init__(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[Type | int | None],
        attributes: Mapping[str, Any],
        *,
        has_reference: bool = True,
    ) -> None:
        self._is_to_compare = has_reference
        self.graph = ir.Graph()
        self.memory: list[tuple[ir.Tensor, torch.Tensor]] = []
        operands = [None if value is None else self._variable(value) for value in inputs]
        op = self.graph.add_op(kind, operands, [], attributes, phase=ir.Phase.FORWARD, name="it")
        inferred = infer_types(self.graph)
        for out, expected in zip(inferred, outputs, strict=False):
            if isinstance(expected, tuple):
                assert out == (expected[0], tuple(expected[1])), (kind, out)
        self.outputs = [
            operands[out] if isinstance(out, int) else out and self._result(*out) for out in outputs
        ]
        op.outputs = [-1 if out is None else out.id for out in self.outputs]
        config = _native.RunConfig(1, 1, False, "sequential")
        with _native.translated_errors():
            self._executable = _native.Executable(to_native(self.graph), config)
            for base, memory in self.memory:
                self._executable.write(base.id, memory)
            self._executable.load()

    def _variable(self, value: torch.Tensor) -> ir.Tensor:
        count = value.untyped_storage().nbytes() // value.element_size()
        base = self.graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, (count,))
        self.memory.append((base, value.as_strided((count,), (1,), 0)))
        return self.graph.add_view(base, value.shape, value.stride(), value.storage_offset())

    def _result(self, dtype: torch.dtype, shape: Sequence[int]) -> ir.Tensor:
        return self.graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape)

    def run(self) -> list[torch.Tensor]:
        """Run the op once more and return its outputs, those that are there."""
        with _native.translated_errors():
            self._executable.run([])
        results = [self._executable.read(out.id) for out in self.outputs if out is not None]
        if self._is_to_compare:
            self._is_to_compare = False  # an op that overwrites an input goes on from there
            assert_as_reference(self, results)
        return results


def infer_types(graph: ir.Graph, op: int = 0) -> list[Any]:
    """Return element type and shape of each result that an op may have; None for one it cannot."""
    with _native.translated_errors():
        types = _native.infer_types(to_native(graph), op)
    return [None if t is None else (getattr(torch, t[0]), tuple(t[1])) for t in types]


def run_op(
    kind: str,
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[Type | int | None],
    *,
    has_reference: bool = True,
    **attributes: Any,
) -> list[torch.Tensor]:
    """Return the outputs of one run of an op, which are those of the reference as well."""
    return OneOp(kind, inputs, outputs, attributes, has_reference=has_reference).run()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that attributes use."""
    return str(dtype).removeprefix("torch.")


def transposed(value: torch.Tensor) -> torch.Tensor:
    """Return the same values with the first axis lying closest in memory."""
    return value.transpose(0, -1).contiguous().transpose(0, -1) if value.dim() > 1 else value


def spread(value: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps in between, after an offset."""
    ends = {0, value.dim() - 1}
    shape = [2 * n + 1 if axis in ends else n for axis, n in enumerate(value.shape)]
    memory = torch.full(shape, 7.0).to(value.dtype)
    gaps = slice(1, None, 2)
    view = memory[tuple(gaps if axis in ends else slice(None) for axis in range(value.dim()))]
    view.copy_(value)
    return view


LAYOUTS = {"contiguous": lambda value: value, "transposed": transposed, "spread": spread}
