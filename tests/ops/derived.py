"""Samples of ops that follow from their entries alone: from the schema and the shape rule."""

from typing import Any

import torch

from popsim_torch import ir
from popsim_torch.errors import InternalError
from popsim_torch.ir import AttributeRule, Operand, OpInfo
from tests.ops.one_op import infer_types
from tests.ops.sample import F16, F32, Sample

SHAPE = (500, 700)


def derived_sample(op: OpInfo) -> Sample:
    """Return a sample of an op: matrices for its inputs, its attributes as small as they may be.

    Args:
        op: What its entry says. Operands that need not be there are left out.

    Raises:
        ValueError: The shape rule does not take that: the op needs a sample of its own.
    """
    attributes = {rule.name: _least(rule) for rule in op.attributes.values() if rule.required}
    inputs = [_operand(operand) for operand in op.inputs if operand.count != "optional"]
    dtypes = tuple(dtype for dtype in (F32, F16) if _takes(op, dtype))
    graph = ir.Graph()
    tensors = [
        graph.add_tensor(ir.TensorKind.VARIABLE, F32 if isinstance(x, tuple) else x.dtype, SHAPE)
        for x in inputs
    ]
    spelt = {k: {"dtype": "float32"}.get(str(v), v) for k, v in attributes.items()}
    graph.add_op(op.name, tensors, [], spelt, phase=ir.Phase.FORWARD, name="it")
    try:
        types = infer_types(graph)
    except InternalError as error:
        raise ValueError(f"{op.name} needs a sample in op_samples.py: {error.message}") from error
    outputs = [out if out is None or out[0] != F32 else out[1] for out in types]
    return Sample(op.name, "derived", inputs, outputs, attributes, dtypes or (F32,))


def _takes(op: OpInfo, dtype: torch.dtype) -> bool:
    floating = [o for o in op.inputs if not o.dtypes or F32 in o.dtypes]
    return all(not operand.dtypes or dtype in operand.dtypes for operand in floating)


def _operand(operand: Operand) -> Any:
    if not operand.dtypes or F32 in operand.dtypes:
        return SHAPE
    return torch.zeros(SHAPE, dtype=min(operand.dtypes, key=str))


def _least(rule: AttributeRule) -> Any:
    """Return the least value that an attribute may have."""
    if rule.choices:
        value: Any = min(rule.choices)
    elif rule.type == "dtype":
        value = "dtype"
    else:
        least = max(rule.least or 0, 0)
        value = {"bool": False, "int": int(least), "float": float(least)}.get(rule.type, "")
    return [value] * (rule.length or 1) if rule.is_list else value
