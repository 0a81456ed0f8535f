"""Measures the time of each op of a program, and counts its work."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import popsim_torch as poptorch
from benchmarks.common.clock import calls_per_round, seconds_per_call
from popsim_torch import _native
from popsim_torch.ir import Graph, Op, Tensor, TensorKind
from popsim_torch.passes.native_graph import to_native
from popsim_torch.passes.op_table import op_table


def family_of(op: Op) -> str:
    """Return the group under which an op is reported."""
    return op_table()[op.kind].family


@dataclass(frozen=True)
class OpRecord:
    """The time and the work of one op of a program in one call.

    Attributes:
        op: The op.
        seconds: Time of all executions in one call; the median over the calls.
        flops: Floating-point operations of all executions, as the op's entry counts them: two per
            multiply-add; a function such as ``exp`` counts as the number of additions that take the
            same time.
        bytes: Bytes read and written by all executions; every tensor counts once per execution.
        text: Kind, name and shapes of the op, for tables.
    """

    op: Op
    seconds: float
    flops: float
    bytes: float
    text: str


@dataclass(frozen=True)
class Profile:
    """The time of a call, and of its ops.

    Attributes:
        seconds: Time of the whole call from Python, without timers inside; the median.
        records: One record for each op that runs, in the order of the program.
    """

    seconds: float
    records: list[OpRecord]


def profile(model: poptorch.PoplarExecutor, args: Sequence[torch.Tensor], rounds: int) -> Profile:
    """Return the times of a call and of its ops, measured alternately.

    The model is compiled if necessary. A training model is trained by this.

    Args:
        model: The result of ``trainingModel`` or ``inferenceModel``.
        args: The arguments of its call.
        rounds: How often the call and the ops are measured.
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
    graph = compiled.host_program.graph
    native = to_native(graph)
    records = []
    for times in zip(*turns, strict=True):
        op, executions = graph.ops[times[0].op], times[0].executions
        work = _native.work_of(native, times[0].op)
        records.append(
            OpRecord(
                op,
                statistics.median(time.seconds for time in times),
                executions * sum(part.flops for part in work),
                executions * sum(part.bytes for part in work),
                _describe(graph, op),
            )
        )
    return Profile(statistics.median(calls), records)


def _tensors(graph: Graph, ids: Iterable[int]) -> list[Tensor]:
    return [graph.tensors[i] for i in ids if i >= 0]


def _describe(graph: Graph, op: Op) -> str:
    kind = str(op.attributes["operator"]) if op.kind == "aten" else op.kind
    inputs = [t for t in _tensors(graph, op.inputs) if t.kind != TensorKind.CONSTANT]
    return f"{kind} '{op.name}' ({_shapes(inputs)} -> {_shapes(_tensors(graph, op.outputs))})"


def _shapes(tensors: list[Tensor]) -> str:
    """Return the tensors' shapes; equal consecutive shapes are shown once, with a count."""
    shapes = ("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
    counts = ((shape, len(list(group))) for shape, group in itertools.groupby(shapes))
    return ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in counts)
