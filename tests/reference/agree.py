"""Whether a kernel and the reference interpreter agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from popsim_torch.ir import Graph, Op, TensorKind
from popsim_torch.reference import Interpreter
from tests.ops.one_op import OneOp

F16, F32, F64 = torch.float16, torch.float32, torch.float64
# Shares of the largest number; sums in another order differ by that much.
CLOSE = {F16: 2e-3, torch.bfloat16: 2e-2, F32: 5e-6, F64: 1e-12}


def assert_agrees(
    actual: torch.Tensor, expected: torch.Tensor, *, close: float | None = None, what: str = ""
) -> None:
    """Compare what a kernel gives with what the interpreter does, in the kernel's type."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected), what
        return
    finite = expected[expected.isfinite() & (expected > -1e29)].double().abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    close = CLOSE[actual.dtype] if close is None else close
    torch.testing.assert_close(
        *(actual.double(), expected.double()),
        rtol=close,
        atol=close * largest + 1e-30,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def interpreted(one: OneOp, **options: object) -> list[torch.Tensor]:
    """Return the outputs of the op as the interpreter has them."""
    interpreter = Interpreter(one.graph, **options)  # type: ignore[arg-type]
    for base, memory in one.memory:
        interpreter.write(base.id, memory)
    interpreter.run()
    return [interpreter.read(out.id) for out in one.outputs if out is not None]


def run_kernel(graph: Graph, op: Op, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Run a user's operator on the device."""
    types = [(graph.tensors[i].dtype, graph.tensors[i].shape) for i in op.outputs]
    return OneOp(op.kind, inputs, types, op.attributes).run()


def variables_of(graph: Graph) -> list[int]:
    """Return the ids of a graph's variables."""
    return [tensor.id for tensor in graph.of_kind(TensorKind.VARIABLE)]
