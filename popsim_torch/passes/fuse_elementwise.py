"""Joins chains of ``map`` ops, so that a chain reads and writes memory once.

A ``map`` op whose only reader is another one of the same shape becomes part of it. Values stay the
same to the last bit: results that were stored as float16 are rounded to float16 in between.
"""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.ir import Graph, Op, TensorKind, Uses

_MAX_INSTRUCTIONS = 48


def fuse_elementwise(graph: Graph) -> int:
    """Fuse ``map`` ops in place.

    Args:
        graph: Complete, returns included: a tensor that is copied to the host has a reader more.
            Names of tensors that are no longer computed stay in the graph.

    Returns:
        The number of ops that became part of another one.
    """
    uses = Uses(graph)
    producers: dict[int, Op] = {}
    fused: set[int] = set()
    for op in graph.ops:
        if op.kind != "map" or not _writes_one_value(graph, op):
            continue
        for tensor_id in list(op.inputs):
            tensor = graph.tensors[tensor_id]
            root = graph.root(tensor)
            producer = producers.get(root.id)
            if (
                producer is not None
                and uses.only_reader(root.id) is op
                and tensor.covers(root)
                and tensor.shape == root.shape == graph.tensors[op.outputs[0]].shape
                and (producer.phase, producer.stage) == (op.phase, op.stage)
                and not uses.reads_changed(producer)
                and len(_code(producer)) + len(_code(op)) < _MAX_INSTRUCTIONS
            ):
                _absorb(graph, op, tensor_id, producer)
                fused.add(id(producer))
        producers[op.outputs[0]] = op
    graph.ops = [op for op in graph.ops if id(op) not in fused]
    return len(fused)


def _code(op: Op) -> list[str]:
    code: Any = op.attributes["code"]
    return list(code)


def _writes_one_value(graph: Graph, op: Op) -> bool:
    return len(op.outputs) == 1 and graph.tensors[op.outputs[0]].kind == TensorKind.VALUE


def _absorb(graph: Graph, op: Op, tensor_id: int, producer: Op) -> None:
    """Compute what ``producer`` writes to ``tensor_id`` inside of ``op`` instead."""
    merged = _Merged()
    value = merged.append(producer, {})[0]
    dtype = graph.tensors[producer.outputs[0]].dtype
    if dtype == torch.float16:
        value = merged.instruction("half", [value])
    elif dtype == torch.bool:
        value = merged.instruction("ne", [value, merged.constant(0.0)])
    results = merged.append(op, {tensor_id: value})
    op.inputs = merged.inputs
    op.attributes.update(merged.attributes(results))


class _Merged:
    """The code of several ``map`` ops, on symbolic values until all are in."""

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self._constants: list[float] = []
        self._lines: list[tuple[str, list[tuple[str, int]]]] = []

    def constant(self, value: float) -> tuple[str, int]:
        self._constants.append(value)
        return ("constant", len(self._constants) - 1)

    def instruction(self, name: str, operands: list[tuple[str, int]]) -> tuple[str, int]:
        self._lines.append((name, operands))
        return ("line", len(self._lines) - 1)

    def append(self, op: Op, known: dict[int, tuple[str, int]]) -> list[tuple[str, int]]:
        """Add an op's code; inputs in ``known`` are values already there. Return its results."""
        attributes: Any = op.attributes
        values = [known[i] if i in known else self._input(i) for i in op.inputs]
        values += [self.constant(value) for value in attributes["constants"]]
        for line in attributes["code"]:
            name, *operands = line.split()
            values.append(self.instruction(name, [values[int(number)] for number in operands]))
        return [values[number] for number in attributes["results"]]

    def _input(self, tensor_id: int) -> tuple[str, int]:
        if tensor_id not in self.inputs:
            self.inputs.append(tensor_id)
        return ("input", self.inputs.index(tensor_id))

    def attributes(self, results: list[tuple[str, int]]) -> dict[str, Any]:
        first = {"input": 0, "constant": len(self.inputs)}
        first["line"] = len(self.inputs) + len(self._constants)

        def number(value: tuple[str, int]) -> int:
            return first[value[0]] + value[1]

        code = [
            " ".join([name, *(str(number(value)) for value in operands)])
            for name, operands in self._lines
        ]
        return {
            "code": code,
            "constants": self._constants,
            "results": [number(value) for value in results],
        }
