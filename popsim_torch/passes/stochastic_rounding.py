"""Rounds float16 results up or down at random: an op in float32, and a rounding after it.

An op that computes a float16 result gets its float16 operands as float32, which is exact, and
returns a float32 result, which ``stochastic_round`` rounds. So one op rounds for all ops, and
kernels need no code for it. Weight updates and accumulations change their tensors in place, a part
at a time,
and round themselves: they have a random stream as an attribute.

Ops that only move numbers are not changed (``OpInfo.exact``). Neither are ``aten`` ops, which
compute in float32 and are followed by a conversion, nor users' kernels, which do not support
float32 instead of float16, nor ops that depend only on constants.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Graph, Op, Phase, Program, Tensor, TensorKind, graphs
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.op_table import op_table

_TYPE_ATTRIBUTES = ("dtype", "dtypes", "statistics")
_PARTIALS = "partials"
_OUTPUTS_PER_STREAM = 8
_HALF, _FLOAT = dtype_name(torch.float16), dtype_name(torch.float32)


def round_at_random(program: Program) -> None:
    """Make every op with float16 results round them at random, in place.

    Random streams follow from the names of the trace's nodes: anchors and the stages of ops do not
    change them. Inside of a loop or branch they follow from the names of its ops; a value that a
    loop's gradient computes again may be rounded differently.

    Args:
        program: The program from lowering.
    """
    for graph in graphs(program.graph):
        _Rounding(graph, program.sources if graph is program.graph else {}).run()


class _Rounding:
    def __init__(self, graph: Graph, sources: Mapping[int, str]) -> None:
        self._graph = graph
        self._sources = sources
        self._ops: list[Op] = []
        self._times: Counter[str] = Counter()
        # The valid float32 copies of float16 memory, by root, phase and stage.
        self._wide: dict[tuple[int, Phase, int], Tensor] = {}

    def run(self) -> None:
        for op in self._graph.ops:
            if not self._rounds(op):
                self._ops.append(op)
            elif op_table()[op.kind].family == "update":
                op.attributes["stream"] = self._stream(op)
                self._ops.append(op)
            else:
                self._widen(op)
            self._forget({root.id for root in self._graph.roots(op.outputs)})
        self._graph.ops = self._ops

    def _rounds(self, op: Op) -> bool:
        """Return whether an op computes float16 results."""
        if op.phase == Phase.SETUP or op_table()[op.kind].exact or op.bodies:
            return False
        if op.kind == "copy" and "dtype" not in op.attributes:
            return False
        return any(self._is_half(i) for i in op.outputs)

    def _is_half(self, tensor_id: int) -> bool:
        return tensor_id != NO_TENSOR and self._graph.tensors[tensor_id].dtype == torch.float16

    def _stream(self, op: Op) -> int:
        """Return the stream of an op's first result; the other results have the next ones."""
        source = next((self._sources[i] for i in op.outputs if i in self._sources), op.name)
        name = f"{op.phase.name} {op.kind} {source}"
        self._times[name] += 1
        name = f"{name} {self._times[name]}"
        number = zlib.crc32(name.encode("utf-8", "backslashreplace"))
        return number % (2**31 // _OUTPUTS_PER_STREAM) * _OUTPUTS_PER_STREAM

    def _widen(self, op: Op) -> None:
        """Add an op in float32, with its inputs and the ops that round its results."""
        stream = self._stream(op)
        inputs = [self._widened(i, op) if self._is_half(i) else i for i in op.inputs]
        outputs, rounding = list(op.outputs), []
        for position, output in enumerate(op.outputs):
            if self._is_half(output):
                wide, rounded = self._twins(self._graph.tensors[output])
                outputs[position] = wide.id
                rounding += self._round(op, wide, rounded, output, stream + position)
        attributes = {k: _in_float32(k, v) for k, v in op.attributes.items() if k != _PARTIALS}
        self._ops.append(replace(op, inputs=inputs, outputs=outputs, attributes=attributes))
        self._ops += rounding

    def _widened(self, tensor_id: int, reader: Op) -> int:
        """Return the float32 copy of a float16 operand."""
        tensor = self._graph.tensors[tensor_id]
        root = self._graph.root(tensor)
        key = (root.id, reader.phase, reader.stage)
        if key not in self._wide:
            copy = self._graph.add_tensor(TensorKind.VALUE, torch.float32, root.shape)
            attributes: Any = {"dtype": _FLOAT}
            self._ops.append(
                replace(
                    reader, kind="copy", inputs=[root.id], outputs=[copy.id], attributes=attributes
                )
            )
            self._wide[key] = copy
        return self._like(tensor, self._wide[key]).id

    def _like(self, tensor: Tensor, memory: Tensor) -> Tensor:
        """Return a view of memory with a tensor's shape and strides."""
        if tensor.kind != TensorKind.VIEW:
            return memory
        return self._graph.add_view(memory, tensor.shape, tensor.strides, tensor.offset)

    def _twins(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return a float32 tensor with an output's layout, and the view of it that is rounded.

        The second one is contiguous, in the order of the memory.
        """
        root = self._graph.root(output)
        if output.memory_order is not None and output.numel == root.numel:
            memory = self._graph.add_tensor(TensorKind.VALUE, torch.float32, root.shape)
            return self._like(output, memory), memory
        memory = self._graph.add_tensor(TensorKind.VALUE, torch.float32, output.shape)
        return memory, memory

    def _round(self, op: Op, wide: Tensor, memory: Tensor, output: int, stream: int) -> list[Op]:
        """Return the ops that round a result and write it to its tensor."""
        root = self._graph.root_of(output)
        whole = memory.shape == root.shape and memory.numel == root.numel
        target = (
            root if whole else self._graph.add_tensor(TensorKind.VALUE, torch.float16, memory.shape)
        )
        attributes: Any = {"stream": stream}
        ops = [
            replace(
                op,
                kind="stochastic_round",
                inputs=[memory.id],
                outputs=[target.id],
                attributes=attributes,
            )
        ]
        if not whole:
            ops.append(
                replace(op, kind="copy", inputs=[target.id], outputs=[output], attributes={})
            )
        return ops

    def _forget(self, written: set[int]) -> None:
        """Drop the copies of tensors that were written since the copies were made."""
        self._wide = {key: copy for key, copy in self._wide.items() if key[0] not in written}


def _in_float32(name: str, value: Any) -> Any:
    """Return an attribute of an op for its float32 form."""
    if name not in _TYPE_ATTRIBUTES:
        return value
    if isinstance(value, list):
        return [_FLOAT if item == _HALF else item for item in value]
    return _FLOAT if value == _HALF else value
