"""Joins chains of ``map`` ops, so that a chain reads and writes memory once.

A ``map`` op whose only reader is another one of the same shape becomes part of it. Values stay the
same to the last bit: results that were stored as float16 are rounded to float16 in between.
"""

from __future__ import annotations

from popsim_torch.ir import Graph, Op, TensorKind, Uses
from popsim_torch.ir.map_code import MapCode, num_instructions

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
                and num_instructions(producer) + num_instructions(op) < _MAX_INSTRUCTIONS
            ):
                _absorb(graph, op, tensor_id, producer)
                fused.add(id(producer))
        producers[op.outputs[0]] = op
    graph.ops = [op for op in graph.ops if id(op) not in fused]
    return len(fused)


def _writes_one_value(graph: Graph, op: Op) -> bool:
    return len(op.outputs) == 1 and graph.tensors[op.outputs[0]].kind == TensorKind.VALUE


def _absorb(graph: Graph, op: Op, tensor_id: int, producer: Op) -> None:
    """Compute what ``producer`` writes to ``tensor_id`` inside of ``op`` instead."""
    code = MapCode.of(producer)
    value = code.stored(code.results[0], graph.tensors[producer.outputs[0]].dtype)
    code.results = code.append(op, {tensor_id: value})
    op.inputs = code.inputs
    op.attributes.update(code.attributes())
