"""Custom operators: their kernels get contiguous tensors with the dtypes of the device."""

from __future__ import annotations

import json
from typing import Any

import torch.fx

from popsim_torch.custom_ops.attributes import packed
from popsim_torch.dtypes import dtype_name, returned_dtype
from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Rule
from popsim_torch.trace.custom import CUSTOM


def _custom(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    given: Any = node.args
    operands, domain, name, version, attributes, _results, gradient_of = given
    inputs: list[Tensor | None] = []
    for operand in operands:
        inputs.append(_as_kernels_see_it(builder, builder.tensor(operand), place))
    # All results, also unread ones: the kernel writes each of them.
    outputs: list[Tensor | None] = [
        builder.value(result.dtype, result.shape) for result in node.meta["val"]
    ]
    described: dict[str, Attribute] = {
        "domain": domain,
        "name": name,
        "version": version,
        **packed(json.loads(attributes)),
    }
    if gradient_of >= 0:
        described["gradient_of"] = gradient_of
    builder.op("custom", inputs, outputs, described, place=place)
    return outputs


def _as_kernels_see_it(builder: Builder, tensor: Tensor, place: Place) -> Tensor:
    dtype = returned_dtype(tensor.dtype)
    if tensor.dtype == dtype:
        return builder.contiguous(tensor, place)
    narrowed = builder.value(dtype, tensor.shape)
    builder.op("copy", [tensor], [narrowed], {"dtype": dtype_name(dtype)}, place=place)
    return narrowed


RULES: dict[Any, Rule] = {CUSTOM: Rule(_custom)}
