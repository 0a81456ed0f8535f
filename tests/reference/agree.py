"""Whether a kernel and the reference interpreter agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from popsim_torch.ir import Graph, Op, TensorKind
from popsim_torch.reference import Interpreter

if TYPE_CHECKING:
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


# The same for ops that may round their operands.
REDUCED = {"bf16": 2e-2, "tf32": 1e-4}
# Ops whose code is not the program's.
FOREIGN = ("custom", "host_call")
# How many results are compared of ops whose further ones are notes for their gradient, which name
# what never happens in ways of their own. `test_ops.py` compares them on usual numbers.
NUM_COMPARED = {"ctc_loss": 1}
# Ops whose kernels add up more exactly than eager PyTorch in their type: theirs is computed wide.
WIDE = ("ctc_loss_grad",)
# As multiples of what other ops have: probabilities are rounded to float16 on the way, and sums go
# along a whole sequence.
LOOSER = {"attention": 3, "ctc_loss_grad": 10}


def assert_as_reference(one: OneOp, results: Sequence[torch.Tensor]) -> None:
    """Compare what the first run of an op gives with what the interpreter does."""
    (op,) = one.graph.ops
    if op.kind in FOREIGN or "partials" in op.attributes:
        return
    wanted = interpreted(one, wide=op.kind in WIDE)
    precision: Any = op.attributes.get("precision")
    pairs = list(zip(results, wanted, strict=True))
    for position, (actual, expected) in enumerate(pairs[: NUM_COMPARED.get(op.kind)]):
        assert_agrees(
            *(actual, expected.to(actual.dtype)),
            close=LOOSER.get(op.kind, 1) * REDUCED.get(precision, CLOSE.get(actual.dtype, 0.0)),
            what=f"{op.kind} is not what the reference gives, result {position}",
        )


def run_kernel(graph: Graph, op: Op, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Run a user's operator on the device."""
    from tests.ops.one_op import OneOp  # which compares by means of this file

    types = [(graph.tensors[i].dtype, graph.tensors[i].shape) for i in op.outputs]
    return OneOp(op.kind, inputs, types, op.attributes).run()


def variables_of(graph: Graph) -> list[int]:
    """Return the ids of a graph's variables."""
    return [tensor.id for tensor in graph.of_kind(TensorKind.VARIABLE)]
