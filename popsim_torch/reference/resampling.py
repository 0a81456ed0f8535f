"""Tensors of another size, and elements at given positions: looked up, or combined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, grad_of, op

aten = torch.ops.aten

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nearest": (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d),
    "nearest_exact": (
        aten._upsample_nearest_exact1d,
        aten._upsample_nearest_exact2d,
        aten._upsample_nearest_exact3d,
    ),
    "linear": (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d),
    "cubic": (None, aten.upsample_bicubic2d, None),
    "smooth linear": (None, aten._upsample_bilinear2d_aa, None),
    "smooth cubic": (None, aten._upsample_bicubic2d_aa, None),
}


def _resampled(call: Call, x: Tensor, size: list[int]) -> Tensor:
    mode = call["mode"]
    scales = [scale or None for scale in call["scales"]]
    corners = [] if mode.startswith("nearest") else [call.get("align_corners", False)]
    kind = f"smooth {mode}" if call.get("antialias", False) else mode
    function = _FUNCTIONS[kind][len(size) - 1]
    y: Tensor = function.default(x, size, *corners, *scales)
    return y


@op
def resample(call: Call, x: Tensor) -> Tensor:
    """Return an interpolated tensor of another size."""
    return _resampled(call, x, call["size"])


@op
def resample_grad(call: Call, grad_y: Tensor) -> Tensor:
    """Return the gradient of the tensor before the interpolation."""
    x = grad_y.new_zeros(*grad_y.shape[:2], *call["input_size"])
    return grad_of(lambda x: _resampled(call, x, list(grad_y.shape[2:])), x, grad_y)


@op
def take_grid(call: Call, x: Tensor, *positions: Tensor) -> Tensor:
    """Return the elements at some positions of neighbouring axes."""
    first = call["axis"]
    if len(positions) == 1:
        return x[(slice(None),) * first + (positions[0].long(),)]
    for axis, index in enumerate(positions, first):
        x = x.index_select(axis, index.long() % x.shape[axis])
    return x


@op
def scatter_reduce(call: Call, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """Return the tensor with elements of another one combined into it."""
    axis = call["axis"]
    positions = index.long()
    if call.get("wraps", False):
        positions = positions % x.shape[axis]
    return x.scatter_reduce(
        *(axis, positions, source, call["function"]), include_self=call.get("include_self", True)
    )
