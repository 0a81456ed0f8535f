"""Rounds float16 results up or down at random: an op in float32, and a rounding after it.

An op that computes a float16 result is given its float16 operands as float32, which is exact, and
gives a float32 result, which ``stochastic_round`` rounds. So one op rounds for all, and no kernel
knows of it. Weight updates and accumulations change their tensors where they are, a part at a time,
and round by themselves: they have a stream of random numbers as an attribute.

What moves numbers and computes none stays as it is (``OpInfo.exact``): so does the long tail, which
computes in float32 and is followed by a conversion, and so do users' kernels, which know no float32
in the place of float16. What depends on constants only stays, too.
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
    """Let every op with float16 results round them at random, in place.

    Streams of random numbers follow from the names of the trace's nodes: what is observed, and on
    which stage an op runs, changes none of them. Inside of a loop or branch they follow from the
    names of its ops; a value that a loop's gradient computes once more may be rounded otherwise.

    Args:
        program: As it was lowered.
    """
    for graph in graphs(program.graph):
        _Rounding(graph, program.sources if graph is program.graph else {}).run()


class _Rounding:
    def __init__(self, graph: Graph, sources: Mapping[int, str]) -> None:
        self._graph = graph
        self._sources = sources
        self._ops: list[Op] = []
        self._times: Counter[str] = Counter()
        # The float32 copies of float16 memory that still hold, by root, phase and stage.
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
        """Whether an op computes float16 results."""
        if op.phase == Phase.SETUP or op_table()[op.kind].exact or op.bodies:
            return False
        if op.kind == "copy" and "dtype" not in op.attributes:
            return False
        return any(self._is_half(i) for i in op.outputs)

    def _is_half(self, tensor_id: int) -> bool:
        return tensor_id != NO_TENSOR and self._graph.tensors[tensor_id].dtype == torch.float16

    def _stream(self, op: Op) -> int:
        """Return the stream of an op's first result; the others have those that follow."""
        source = next((self._sources[i] for i in op.outputs if i in self._sources), op.name)
        name = f"{op.phase.name} {op.kind} {source}"
        self._times[name] += 1
        name = f"{name} {self._times[name]}"
        number = zlib.crc32(name.encode("utf-8", "backslashreplace"))
        return number % (2**31 // _OUTPUTS_PER_STREAM) * _OUTPUTS_PER_STREAM

    def _widen(self, op: Op) -> None:
        """Add an op in float32, what it reads and what rounds its results."""
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
        """Return memory seen with a tensor's shape and strides."""
        if tensor.kind != TensorKind.VIEW:
            return memory
        return self._graph.add_view(memory, tensor.shape, tensor.strides, tensor.offset)

    def _twins(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return a float32 tensor that lies as an output does, and what is rounded of it.

        The second of the two is contiguous and has the order of the memory.
        """
        root = self._graph.root(output)
        if output.memory_order is not None and output.numel == root.numel:
            memory = self._graph.add_tensor(TensorKind.VALUE, torch.float32, root.shape)
            return self._like(output, memory), memory
        memory = self._graph.add_tensor(TensorKind.VALUE, torch.float32, output.shape)
        return memory, memory

    def _round(self, op: Op, wide: Tensor, memory: Tensor, output: int, stream: int) -> list[Op]:
        """Return the ops that round a result to where it belongs."""
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
        """Drop the copies of what has been written since they were made."""
        self._wide = {key: copy for key, copy in self._wide.items() if key[0] not in written}


def _in_float32(name: str, value: Any) -> Any:
    """Return an attribute of an op as it is in float32."""
    if name not in _TYPE_ATTRIBUTES:
        return value
    if isinstance(value, list):
        return [_FLOAT if item == _HALF else item for item in value]
    return _FLOAT if value == _HALF else value
