"""Where the time of a program goes, op by op, and how much work each op has."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import popsim_torch as poptorch
from benchmarks.common.clock import calls_per_round, seconds_per_call
from popsim_torch import _native
from popsim_torch.ir import Graph, Op, Tensor, TensorKind

_FAMILY_OF_KIND = {
    "accumulate": "update",
    "anchor": "copy and anchor",
    "aten": "aten",
    "copy": "copy and anchor",
    "map": "elementwise",
    "matmul": "matmul",
}
# For kinds that are not in the table: the first part that the name contains decides.
_FAMILY_BY_PART = (
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("update", "update"),
    ("accumulate", "update"),
    ("gradient_norm", "update"),
    ("lstm", "recurrent"),
    ("gru", "recurrent"),
    ("rnn", "recurrent"),
    ("norm", "norm and softmax"),
    ("softmax", "norm and softmax"),
    ("loss", "loss"),
    ("nll", "loss"),
    ("cross_entropy", "loss"),
    ("pool", "pool"),
    ("reduce", "reduction"),
    ("sum", "reduction"),
)


def family_of(op: Op) -> str:
    """Return the group of ops that an op is reported with."""
    if op.kind in _FAMILY_OF_KIND:
        return _FAMILY_OF_KIND[op.kind]
    return next((family for part, family in _FAMILY_BY_PART if part in op.kind), op.kind)


@dataclass(frozen=True)
class OpRecord:
    """What one op of a program does in one call.

    Attributes:
        op: The op.
        seconds: Median over the calls, of all executions in one call.
        flops: Floating-point operations of all executions: two per multiply-add for the dense
            ops, one per instruction and element for elementwise ops, else 0 (not counted).
        bytes: Read and written by all executions, every tensor counted once per execution.
        text: Kind, name and shapes, for tables.
    """

    op: Op
    seconds: float
    flops: float
    bytes: float
    text: str


@dataclass(frozen=True)
class Profile:
    """Where the time of a call goes.

    Attributes:
        seconds: Median of the whole call, from Python, with nothing timed inside of it.
        records: Of every op that runs, in the order of the program.
    """

    seconds: float
    records: list[OpRecord]


def profile(model: poptorch.PoplarExecutor, args: Sequence[torch.Tensor], rounds: int) -> Profile:
    """Return the times of a call and of its ops, measured in turn.

    The model is compiled if it is not. A training model trains.

    Args:
        model: What ``trainingModel`` or ``inferenceModel`` returned.
        args: The arguments of its call.
        rounds: How often call and ops get a turn.
    """
    model(*args)
    compiled = model.compiled
    inputs = [
        tensor.to(dtype)
        for tensor, dtype in zip(
            compiled.arguments.flatten(args), compiled.input_dtypes, strict=True
        )
    ]
    num_calls = calls_per_round(lambda: model(*args))
    calls: list[float] = []
    turns: list[list[_native.OpTime]] = []
    for _ in range(rounds):
        calls.append(seconds_per_call(lambda: model(*args), num_calls))
        turns.append(compiled.executable.profile(inputs, num_calls))
    graph = compiled.program.graph
    records = []
    for times in zip(*turns, strict=True):
        op, executions = graph.ops[times[0].op], times[0].executions
        records.append(
            OpRecord(
                op,
                statistics.median(time.seconds for time in times),
                executions * _flops(graph, op),
                executions * _bytes(graph, op),
                _describe(graph, op),
            )
        )
    return Profile(statistics.median(calls), records)


def _tensors(graph: Graph, ids: Iterable[int]) -> list[Tensor]:
    return [graph.tensors[i] for i in ids if i >= 0]


def _bytes(graph: Graph, op: Op) -> float:
    """Return the size of what an op reads and writes; an expanded dimension is read once."""
    read = {i: graph.tensors[i] for i in op.inputs if i >= 0}
    total = 0
    for tensor in (*read.values(), *_tensors(graph, op.outputs)):
        sizes = [
            size for size, stride in zip(tensor.shape, tensor.strides, strict=True) if stride != 0
        ]
        total += math.prod(sizes) * tensor.dtype.itemsize
    if op.kind == "anchor":
        total *= 2
    return total


def _flops(graph: Graph, op: Op) -> float:
    inputs, outputs = _tensors(graph, op.inputs), _tensors(graph, op.outputs)
    if op.kind == "matmul":
        return 2.0 * math.prod(outputs[0].shape) * inputs[0].shape[-1]
    if op.kind == "convolution":
        return _convolution_flops(inputs[0], inputs[1], outputs[0], op)
    if op.kind == "convolution_grad_input":
        return _convolution_flops(outputs[0], inputs[1], inputs[0], op)
    if op.kind == "convolution_grad_weight":
        return _convolution_flops(inputs[1], outputs[0], inputs[0], op)
    if op.kind.startswith("attention"):
        return _attention_flops(graph, op)
    if op.kind == "map":
        code = op.attributes["code"]
        assert isinstance(code, list)
        return float(len(code) * math.prod(outputs[0].shape))
    return 0.0


def _attention_flops(graph: Graph, op: Op) -> float:
    """Return two operations per element of an operand and row or column of its product."""
    shape = op.attributes["shape"]
    assert isinstance(shape, list)
    rows, columns = (int(size) for size in shape[-2:])  # type: ignore[arg-type]
    # By position of the operand: the size of the product that it does not have itself.
    uses = {0: columns, 2: rows}
    if op.kind == "attention_grad":
        uses = {1: columns, 4: columns, 6: rows, 7: columns, 8: columns}
    return 2.0 * sum(
        count * math.prod(graph.tensors[op.inputs[position]].shape)
        for position, count in uses.items()
        if op.inputs[position] >= 0
    )


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, op: Op) -> float:
    """Return two operations per weight and position where it is used."""
    positions = (x if op.attributes["transposed"] else y).shape
    return 2.0 * positions[0] * math.prod(positions[2:]) * math.prod(weight.shape)


def _describe(graph: Graph, op: Op) -> str:
    kind = str(op.attributes["operator"]) if op.kind == "aten" else op.kind
    inputs = [t for t in _tensors(graph, op.inputs) if t.kind != TensorKind.CONSTANT]
    return f"{kind} '{op.name}' ({_shapes(inputs)} -> {_shapes(_tensors(graph, op.outputs))})"


def _shapes(tensors: list[Tensor]) -> str:
    """Return the tensors' shapes, equal ones that follow each other as one with a count."""
    shapes = ("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
    counts = ((shape, len(list(group))) for shape, group in itertools.groupby(shapes))
    return ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in counts)
