"""Batch norm with fixed statistics: an elementwise operation."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Tensor
from popsim_torch.lowering.builder import Builder, Place, Value
from popsim_torch.lowering.elementwise import Code, emit_map

aten = torch.ops.aten

_FLOATING = frozenset({torch.float16, torch.float32})


def is_fixed_norm(node: torch.fx.Node) -> bool:
    """Whether a node is a batch norm in eval mode."""
    return node.target is aten._native_batch_norm_legit_no_training.default and all(
        source.meta["val"].dtype in _FLOATING for source in node.all_input_nodes
    )


def lower_fixed_norm(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add a ``map`` op for a node.

    Returns:
        The normalised tensor and, in the place of the batch's statistics that eval mode does not
        compute, two empty results.
    """
    arguments: Any = node.args
    x, weight, bias, mean, variance, _momentum, epsilon = arguments
    code = Code()

    def channels(source: torch.fx.Node) -> Tensor:
        """Return a per-channel vector so that it broadcasts over ``[N, C, ...]``."""
        vector = builder.tensor(source)
        rank = len(x.meta["val"].shape)
        shape = (*vector.shape, *[1] * (rank - 2))
        strides = (*vector.strides, *[1] * (rank - 2))
        return builder.graph.add_view(vector, shape, strides, vector.offset)

    scale = code("div", 1.0, code("sqrt", code("add", channels(variance), epsilon)))
    if weight is not None:
        scale = code("mul", scale, channels(weight))
    shift = code("neg", code("mul", channels(mean), scale))
    if bias is not None:
        shift = code("add", channels(bias), shift)
    result = code("add", code("mul", builder.tensor(x), scale), shift)
    value: torch.Tensor = node.meta["val"][0]
    out = emit_map(builder, code, result, value.dtype, value.shape, place)
    unused = [builder.constant(torch.zeros(r.shape, dtype=r.dtype)) for r in node.meta["val"][1:]]
    return [out, *unused]
