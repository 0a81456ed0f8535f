"""Ways to spoil a program: what a wrong lowering or a wrong pass might do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch

from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind, contiguous_strides
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.op_table import op_table

Mutation = Callable[[Graph, Random], str | None]
"""Changes a graph and says how, or finds nothing to change."""

_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
)
_NUMBERS = (-(2**40), -7, -1, 0, 1, 2, 3, 5, 64, 2**31, 2**62)


def clone(graph: Graph) -> Graph:
    """Return a graph whose tensors and ops can be changed."""
    result = Graph()
    result.tensors = [replace(tensor) for tensor in graph.tensors]
    result.ops = [
        replace(
            op,
            inputs=list(op.inputs),
            outputs=list(op.outputs),
            attributes=copy.deepcopy(op.attributes),
            bodies=[clone(body) for body in op.bodies],
        )
        for op in graph.ops
    ]
    result.names = dict(graph.names)
    return result


def _used(graph: Graph, random: Random, of: str = "inputs outputs") -> Tensor | None:
    """Pick a tensor that an op reads or writes."""
    ids = [i for op in graph.ops for what in of.split() for i in getattr(op, what) if i >= 0]
    return graph.tensors[random.choice(ids)] if ids else None


def _op(
    graph: Graph, random: Random, condition: Callable[[Op], Any] = lambda op: True
) -> Op | None:
    ops = [op for op in graph.ops if condition(op)]
    return random.choice(ops) if ops else None


def _resize(graph: Graph, tensor: Tensor, shape: tuple[int, ...]) -> None:
    tensor.shape, tensor.strides = shape, contiguous_strides(shape)
    if tensor.value is not None:
        tensor.value = torch.zeros(shape, dtype=tensor.dtype)


def other_size(graph: Graph, random: Random) -> str | None:
    tensor = _used(graph, random)
    if tensor is None or not tensor.shape:
        return None
    axis = random.randrange(len(tensor.shape))
    size = random.choice(
        [tensor.shape[axis] + 1, tensor.shape[axis] - 1, 2 * tensor.shape[axis], 1, 0]
    )
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    _resize(graph, tensor, shape)
    return f"{tensor.kind.value} {tensor.id} is {shape}"


def other_rank(graph: Graph, random: Random) -> str | None:
    tensor = _used(graph, random)
    if tensor is None:
        return None
    axis = random.randrange(len(tensor.shape) + 1)
    shape = random.choice(
        [
            (*tensor.shape[:axis], 1, *tensor.shape[axis:]),
            tensor.shape[1:],
            tensor.shape[:-1],
            tuple(reversed(tensor.shape)),
            (tensor.numel,),
        ]
    )
    _resize(graph, tensor, shape)
    return f"{tensor.kind.value} {tensor.id} is {shape}"


def other_dtype(graph: Graph, random: Random) -> str | None:
    """Give a tensor and all that lies in its memory another element type."""
    tensor = _used(graph, random)
    if tensor is None:
        return None
    root, dtype = graph.root(tensor), random.choice(_DTYPES)
    for other in graph.tensors:
        if graph.root(other) is root:
            other.dtype = dtype
    if root.value is not None:
        root.value = root.value.to(dtype)
    return f"tensor {root.id} is {dtype}"


def other_dtype_of_one(graph: Graph, random: Random) -> str | None:
    tensor = _used(graph, random)
    if tensor is None:
        return None
    tensor.dtype = random.choice(_DTYPES)
    return f"only tensor {tensor.id} is {tensor.dtype}"


def other_kind_of_tensor(graph: Graph, random: Random) -> str | None:
    tensor = _used(graph, random)
    if tensor is None:
        return None
    tensor.kind = random.choice(list(TensorKind))
    return f"tensor {tensor.id} is a {tensor.kind.value}"


def missing_input(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random, lambda op: op.inputs)
    if op is None:
        return None
    position = random.randrange(len(op.inputs))
    if random.random() < 0.5:
        del op.inputs[position]
    else:
        op.inputs[position] = NO_TENSOR
    return f"{op.kind} without input {position}"


def missing_output(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random, lambda op: op.outputs)
    if op is None:
        return None
    position = random.randrange(len(op.outputs))
    if random.random() < 0.5:
        del op.outputs[position]
    else:
        op.outputs[position] = NO_TENSOR
    return f"{op.kind} without output {position}"


def extra_operand(graph: Graph, random: Random) -> str | None:
    op, tensor = _op(graph, random), _used(graph, random)
    if op is None or tensor is None:
        return None
    operands = random.choice([op.inputs, op.inputs, op.outputs])
    operands.insert(random.randrange(len(operands) + 1), random.choice([tensor.id, NO_TENSOR]))
    return f"{op.kind} with one operand more"


def swapped_operands(graph: Graph, random: Random) -> str | None:
    operands = random.choice(["inputs", "inputs", "outputs"])
    op = _op(graph, random, lambda op: len(getattr(op, operands)) > 1)
    if op is None:
        return None
    ids = getattr(op, operands)
    a, b = random.sample(range(len(ids)), 2)
    ids[a], ids[b] = ids[b], ids[a]
    return f"{op.kind} with {operands} {a} and {b} swapped"


def other_operand(graph: Graph, random: Random) -> str | None:
    operands = random.choice(["inputs", "outputs"])
    op, tensor = _op(graph, random, lambda op: getattr(op, operands)), _used(graph, random)
    if op is None or tensor is None:
        return None
    ids = getattr(op, operands)
    position = random.randrange(len(ids))
    ids[position] = random.choice(
        [
            tensor.id,
            tensor.id,
            tensor.id,
            len(graph.tensors),
            -2,
            random.randrange(len(graph.tensors)),
        ]
    )
    return f"{op.kind} with {operands} {position} = {ids[position]}"


def like_operand(graph: Graph, random: Random) -> str | None:
    """Exchange an operand for another tensor of the same type."""
    operands = random.choice(["inputs", "outputs"])
    op = _op(graph, random, lambda op: any(i >= 0 for i in getattr(op, operands)))
    if op is None:
        return None
    ids = getattr(op, operands)
    position = random.choice([p for p, i in enumerate(ids) if i >= 0])
    tensor = graph.tensors[ids[position]]
    alike = [
        other.id
        for other in graph.tensors
        if (other.shape, other.dtype) == (tensor.shape, tensor.dtype) and other is not tensor
    ]
    if not alike:
        return None
    ids[position] = random.choice(alike)
    return f"{op.kind} with {operands} {position} = {ids[position]}, which looks the same"


def missing_attribute(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random, lambda op: op.attributes)
    if op is None:
        return None
    name = random.choice(list(op.attributes))
    del op.attributes[name]
    return f"{op.kind} without {name}"


def extra_attribute(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random)
    if op is None:
        return None
    name = random.choice(["size", "axis", "dtype", "shape", "parameters", "partials", "alpha"])
    if name in op.attributes:
        return None
    op.attributes[name] = random.choice([1, 2.0, "half", True, [1, 2]])
    return f"{op.kind} with {name} = {op.attributes[name]}"


def other_attribute(graph: Graph, random: Random) -> str | None:
    """Give an attribute another value of its type, or of another one."""
    op = _op(graph, random, lambda op: op.attributes)
    if op is None:
        return None
    name = random.choice(list(op.attributes))
    value: Any = op.attributes[name]
    op.attributes[name] = _other_value(value, random)
    return f"{op.kind} with {name} = {op.attributes[name]!r} instead of {value!r}"


def _other_value(value: Any, random: Random) -> Any:
    if random.random() < 0.15:
        return random.choice([True, 3, 0.5, "half", [1], ["neg 0"], [0.5]])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice([value + 1, value - 1, *_NUMBERS])
    if isinstance(value, float):
        return random.choice([-value, 0.0, float("nan"), float("inf"), 1e30])
    if isinstance(value, str):
        words = (
            "float16",
            "int64",
            "sum",
            "none",
            "Final",
            "gru",
            "uniform",
            "aten::mul",
            "Tensor",
        )
        if value[:1].isalpha() and " " in value:  # an instruction of a map
            name, *numbers = value.split()
            return " ".join([name, *(str(int(n) + random.choice([0, 1, -1])) for n in numbers)])
        return random.choice([*words, "", value[:-1]])
    if isinstance(value, list) and value:
        changed = list(value)
        position = random.randrange(len(changed))
        match random.randrange(4):
            case 0:
                del changed[position]
            case 1:
                changed.append(changed[position])
            case _:
                changed[position] = _other_value(changed[position], random)
        return changed
    return [random.choice(_NUMBERS)] if isinstance(value, list) else value


def other_kind(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random)
    if op is None:
        return None
    was = op.kind
    op.kind = random.choice([*op_table(), f"{was}s"])
    return f"{op.kind} instead of {was}"


def moved_op(graph: Graph, random: Random) -> str | None:
    if len(graph.ops) < 2:
        return None
    op = graph.ops.pop(random.randrange(len(graph.ops)))
    position = random.randrange(len(graph.ops) + 1)
    graph.ops.insert(position, op)
    return f"{op.kind} at {position}"


def missing_op(graph: Graph, random: Random) -> str | None:
    op = graph.ops.pop(random.randrange(len(graph.ops)))
    return f"no {op.kind}"


def extra_result(graph: Graph, random: Random) -> str | None:
    results = graph.ops[-1].inputs if graph.ops and graph.ops[-1].kind == "yield" else []
    others = [i for op in graph.ops for i in op.outputs if i >= 0 and i not in results]
    if not results or not others:
        return None
    results.append(random.choice(others))
    return f"the body also gives {results[-1]}"


def repeated_op(graph: Graph, random: Random) -> str | None:
    position = random.randrange(len(graph.ops))
    op = graph.ops[position]
    graph.ops.insert(position, replace(op))
    return f"{op.kind} twice"


def other_phase(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random)
    if op is None:
        return None
    op.phase = random.choice(list(Phase))
    return f"{op.kind} in {op.phase.name}"


def other_stage(graph: Graph, random: Random) -> str | None:
    op = _op(graph, random)
    if op is None:
        return None
    op.stage = random.choice([op.stage + 1, op.stage - 1, 0, 2, -3, 2**30])
    return f"{op.kind} on stage {op.stage}"


def _view(graph: Graph, random: Random) -> Tensor | None:
    ids = {i for op in graph.ops for i in (*op.inputs, *op.outputs) if i >= 0}
    views = [graph.tensors[i] for i in sorted(ids) if graph.tensors[i].kind == TensorKind.VIEW]
    return random.choice(views) if views else None


def other_offset(graph: Graph, random: Random) -> str | None:
    view = _view(graph, random)
    if view is None:
        return None
    view.offset += random.choice([1, -1, 2, view.numel, graph.root(view).numel, 2**40])
    return f"view {view.id} at {view.offset}"


def other_strides(graph: Graph, random: Random) -> str | None:
    view = _view(graph, random)
    if view is None or not view.shape:
        return None
    strides = list(view.strides)
    axis = random.randrange(len(strides))
    strides[axis] = random.choice(
        [strides[axis] + 1, strides[axis] - 1, 0, 1, -1, 2 * strides[axis]]
    )
    if random.random() < 0.2:
        random.shuffle(strides)
    view.strides = tuple(strides[: random.choice([len(strides)] * 9 + [len(strides) - 1])])
    return f"view {view.id} with strides {view.strides}"


def other_view_size(graph: Graph, random: Random) -> str | None:
    """Let a view see more or less, wherever its strides lead."""
    view = _view(graph, random)
    if view is None or not view.shape:
        return None
    shape = list(view.shape)
    axis = random.randrange(len(shape))
    shape[axis] = random.choice([shape[axis] + 1, shape[axis] - 1, 2 * shape[axis], 0, -1])
    view.shape = tuple(shape)
    return f"view {view.id} of {view.shape}"


def other_base(graph: Graph, random: Random) -> str | None:
    view = _view(graph, random)
    if view is None:
        return None
    view.base = random.choice([random.randrange(len(graph.tensors)), -1, len(graph.tensors)])
    return f"view {view.id} of tensor {view.base}"


def other_memory(graph: Graph, random: Random) -> str | None:
    """Let a tensor be a part of another tensor's memory."""
    tensor, other = _used(graph, random), _used(graph, random)
    if tensor is None or other is None or graph.root(other) is graph.root(tensor):
        return None
    if any(view.base == tensor.id for view in graph.tensors):
        return None
    tensor.kind, tensor.base, tensor.value = TensorKind.VIEW, graph.root(other).id, None
    tensor.offset = 0
    return f"tensor {tensor.id} lies in {tensor.base}"


MUTATIONS: tuple[Mutation, ...] = (
    *(other_size, other_rank, other_dtype, other_dtype_of_one, other_kind_of_tensor),
    *(missing_input, missing_output, extra_operand, swapped_operands, other_operand, like_operand),
    *(missing_attribute, extra_attribute, other_attribute, other_kind),
    *(moved_op, missing_op, extra_result, repeated_op, other_phase, other_stage),
    *(other_offset, other_strides, other_view_size, other_base, other_memory),
)
