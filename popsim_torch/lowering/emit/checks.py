"""Adds checks of values to a program: a run that fails one raises an error."""

from __future__ import annotations

import torch

from popsim_torch.ir import Argument, Attribute, Tensor, TensorArgument
from popsim_torch.ir.map_code import MapCode
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.private_torch.operators import schema_of

_ASSERT = schema_of(torch.ops.aten._assert_async.msg)


def check_range(
    builder: Builder, tensor: Tensor, low: float, high: float, message: str, place: Place
) -> None:
    """Add ops that end the run if an element is NaN or out of range.

    Args:
        builder: The graph under construction.
        tensor: The tensor to check, of floats.
        low: The least value.
        high: The largest value.
        message: The message of the error.
        place: The place of the ops.
    """
    if tensor.numel == 0:
        return
    code = MapCode()
    within = code("and", code("ge", tensor, low), code("le", tensor, high))
    # Numbers, because they have a fast reduction.
    flags = emit_map(
        builder, code, code("where", within, 1.0, 0.0), torch.float32, tensor.shape, place
    )
    passed = builder.value(torch.float32, ())
    reduction: dict[str, Attribute] = {
        "function": "amin",
        "axes": list(range(len(tensor.shape))),
        "keepdim": False,
        "dtype": "float32",
    }
    builder.op("reduce", [flags], [passed], reduction, place=place)
    arguments: list[Argument] = [TensorArgument(0), message]
    attributes: dict[str, Attribute] = {
        "operator": _ASSERT.name,
        "overload": _ASSERT.overload_name,
        "arguments": arguments,
    }
    builder.op("aten", [passed], [], attributes, place=place)
