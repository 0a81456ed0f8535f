"""Says which rule of arithmetic an op broke when it computed a bad number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name, is_continuous
from popsim_torch.errors import Error
from popsim_torch.ir import Graph, Op, TensorKind
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.op_table import op_table
from popsim_torch.reference import Interpreter
from popsim_torch.reference.elementwise import INSTRUCTIONS

__all__ = ["FailedOp", "exact_value", "number_of", "op_title", "rule_of"]


def number_of(element: torch.Tensor) -> float:
    """Return an element; of a complex number its bad part, or its size if it has none."""
    if not element.is_complex():
        return float(element)
    parts: list[float] = torch.view_as_real(element.resolve_conj()).tolist()
    bad = sorted((part for part in parts if not math.isfinite(part)), key=math.isinf)
    return bad[0] if bad else math.hypot(*parts)


@dataclass(frozen=True)
class FailedOp:
    """An execution of an op that computed a bad number.

    Attributes:
        graph: The graph of the op.
        op: The op.
        operands: Copies of its inputs, as it read them; None for those that are left out.
        result: The bad result.
        output: The position of this result among the outputs.
        index: The position of the first bad element.
    """

    graph: Graph
    op: Op
    operands: Sequence[torch.Tensor | None]
    result: torch.Tensor
    output: int
    index: tuple[int, ...]

    @property
    def value(self) -> float:
        """The bad element."""
        return number_of(self.result[self.index])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.result.dtype

    def element(self, position: int) -> float | None:
        """Return the element of an operand that the bad one is computed from, if it is one."""
        operand = self.operands[position]
        if operand is None or self.op.kind != "map":
            return None
        return float(operand.expand(self.result.shape)[self.index])


def op_title(op: Op) -> str:
    """Return the name of an operation for users: an instruction, an operator or a kind."""
    attributes: Any = op.attributes
    if op.kind == "map":
        names = [line.split()[0] for line in attributes["code"]]
        return " and ".join(dict.fromkeys(names)) or "copy"
    if op.kind == "aten":
        return str(attributes["operator"])
    if op.kind == "custom":
        return f"{attributes['domain']}::{attributes['name']}"
    return op.kind


def rule_of(failed: FailedOp, exact: float | None) -> str:
    """Return which rule an op broke, as a text.

    Args:
        failed: The op.
        exact: The bad element, computed in float64; None if it is unknown.
    """
    if failed.op.kind == "map":
        found = _rule_of_map(failed)
        if found:
            return found
    return _rule_of_whole(failed, exact)


def exact_value(failed: FailedOp) -> float | None:
    """Return the bad element, computed from the same operands in float64; None if unknown.

    Code of users is not run again.
    """
    op = failed.op
    # What an accumulator held before is a part of neither.
    if op.bodies or op.kind == "accumulate":
        return None
    graph, made = Graph(), dict[int, int]()
    inputs, outputs = [], []
    for i in op.inputs:
        if i != NO_TENSOR and i not in made:
            tensor = failed.graph.tensors[i]
            made[i] = graph.add_tensor(TensorKind.VARIABLE, tensor.dtype, tensor.shape).id
        inputs.append(made.get(i, NO_TENSOR))
    for i in op.outputs:
        outputs.append(NO_TENSOR if i == NO_TENSOR else _output(failed, i, graph, made))
    twin = graph.add_op(op.kind, [], [], op.attributes, phase=op.phase, name=op.name)
    twin.inputs, twin.outputs = inputs, outputs
    interpreter = Interpreter(graph, wide=True)
    try:
        for i, operand in zip(inputs, failed.operands, strict=True):
            if operand is not None:
                interpreter.write(i, operand)
        interpreter.run()
        return number_of(interpreter.read(outputs[failed.output])[failed.index])
    except (Error, RuntimeError, ValueError):
        return None  # operands that the formula of the op refuses


def _output(failed: FailedOp, tensor_id: int, graph: Graph, made: dict[int, int]) -> int:
    """Return the tensor for an output; an input's, if the op changes that input in place."""
    root, tensor = failed.graph.root_of(tensor_id).id, failed.graph.tensors[tensor_id]
    for i, own in made.items():
        if failed.graph.root_of(i).id == root and failed.graph.tensors[i].shape == tensor.shape:
            return own
    return graph.add_tensor(TensorKind.VALUE, tensor.dtype, tensor.shape).id


# --- The instructions of maps ---


def _rule_of_map(failed: FailedOp) -> str:
    """Return the rule that the first failing instruction of a map broke; empty if none did."""
    attributes: Any = failed.op.attributes
    elements = [failed.element(i) for i in range(len(failed.operands))]
    values = [torch.tensor(0.0 if x is None else x) for x in elements]
    values += [torch.tensor(float(number)) for number in attributes["constants"]]
    kind = math.isnan if math.isnan(failed.value) else math.isinf
    for line in attributes["code"]:
        name, *numbers = line.split()
        given = [values[int(number)] for number in numbers]
        values.append(_computed(name, given))
        result, operands = values[-1].item(), [x.item() for x in given]
        if kind(result) and not any(map(kind, operands)):
            return _rule_of_instruction(name, operands, result, failed.dtype)
    if any(kind(number) for number in attributes["constants"]):
        return f"no arithmetic: {failed.value:g} is a constant of the op"
    return ""


def _computed(name: str, given: Sequence[torch.Tensor]) -> torch.Tensor:
    if name == "half":
        return given[0].to(torch.float16).float()
    if name == "bfloat16":
        return given[0].to(torch.bfloat16).float()
    return INSTRUCTIONS[name](*given).float()


_BELOW_ZERO = {"log": 0.0, "log2": 0.0, "log1p": -1.0, "sqrt": 0.0, "rsqrt": 0.0}
_AT_POLE: dict[str, Callable[[Sequence[float]], bool]] = {
    "reciprocal": lambda x: x[0] == 0,
    "rsqrt": lambda x: x[0] == 0,
    "inverse_square": lambda x: x[0] == 0,
    "pow": lambda x: x[0] == 0,
    "div": lambda x: x[1] == 0,
}


def _rule_of_instruction(
    name: str, operands: Sequence[float], result: float, dtype: torch.dtype
) -> str:
    x = operands[0]
    shown = [f"{number:g}" for number in operands]
    if math.isnan(result):
        if name in _BELOW_ZERO and x < _BELOW_ZERO[name]:
            what = "a number below -1" if name == "log1p" else "a negative number"
            return f"{name} of {what}: {name}({shown[0]})"
        signs = {"div": "/", "mul": "*", "sub": "-", "add": "+"}
        if name in signs:
            # A sum of infinities with two signs is a difference.
            return f"undefined: {shown[0]} {signs[name]} {shown[1]}"
        return f"undefined: {name}({', '.join(shown)})"
    if name in ("log", "log2", "log1p"):
        return f"{name} of {'-1' if name == 'log1p' else 'zero'}: {name}({shown[0]})"
    if name in _AT_POLE and _AT_POLE[name](operands):
        call = f"{shown[0]} / 0" if name == "div" else f"{name}({', '.join(shown)})"
        return f"division by zero: {call}"
    of = {"half": "float16", "bfloat16": "bfloat16"}.get(name)
    if of is not None or dtype == torch.float16:
        return f"overflow of {of or 'float16'}: {_size(x, name, operands)}"
    return f"overflow of float32: {name}({', '.join(shown)})"


def _size(x: float, name: str, operands: Sequence[float]) -> str:
    if name in ("half", "bfloat16"):
        return (
            f"{abs(x):g} > {torch.finfo(torch.float16 if name == 'half' else torch.bfloat16).max:g}"
        )
    return f"{name}({', '.join(f'{number:g}' for number in operands)})"


# --- Other ops ---


def _rule_of_whole(failed: FailedOp, exact: float | None) -> str:
    """Return the rule for an op whose elements depend on many."""
    operands = [x for x in failed.operands if x is not None and is_continuous(x.dtype)]
    has_infinity = any(bool(x.isinf().any()) for x in operands)
    is_finite = exact is not None and math.isfinite(exact)
    kind = dtype_name(failed.dtype)
    entry = op_table()[failed.op.kind]
    if entry.family == "custom" or (entry.family == "host" and entry.calls_host):
        return f"the code of the user computed {failed.value:g} from finite operands"
    if math.isnan(failed.value):
        if has_infinity:
            return "undefined: inf - inf, 0 * inf or inf / inf, from an infinite operand"
        if is_finite:
            return f"overflow of {kind} inside of the op: float64 gives {exact:g}"
        return "undefined: 0 / 0, or a root or logarithm of a negative number"
    largest = torch.finfo(failed.dtype).max
    if exact is not None and is_finite:
        if abs(exact) > largest:
            return f"overflow of {kind}: {abs(exact):g} > {largest:g}"
        return f"overflow of {kind} inside of the op: float64 gives {exact:g}"
    if exact is not None and math.isinf(exact):
        return "division by zero, or a logarithm of zero"
    return f"overflow of {kind}, or division by zero"
