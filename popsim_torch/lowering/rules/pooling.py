"""Pooling over images."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import HALF_AND_FLOAT, Rule, operands

aten = torch.ops.aten

_MAX = aten.max_pool2d_with_indices.default
_MAX_BACKWARD = aten.max_pool2d_with_indices_backward.default
_AVERAGE = aten.avg_pool2d.default
_AVERAGE_BACKWARD = aten.avg_pool2d_backward.default
_ADAPTIVE = aten._adaptive_avg_pool2d.default
_ADAPTIVE_BACKWARD = aten._adaptive_avg_pool2d_backward.default
# Largest image whose positions fit into 32 bits.
_SMALL = 2**31 - 1


def _are_images(node: torch.fx.Node) -> bool:
    tensors = operands(node)
    images = all(len(t.shape) == 4 and t.numel() > 0 for t in tensors)
    return images and tensors[0].dtype in HALF_AND_FLOAT


def _pair(value: Any) -> list[int]:
    """Return one value per axis; a single value holds for both axes."""
    values = [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
    return values * 2 if len(values) == 1 else values


def _like(builder: Builder, other: Tensor, dtype: torch.dtype, shape: Any) -> Tensor:
    """Add a tensor with channels last if ``other`` has channels last."""
    if builder.channels_last(other) is None:
        return builder.value(dtype, shape)
    return builder.image(dtype, shape)


def _window(
    kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any
) -> dict[str, Attribute]:
    return {
        "kernel": _pair(kernel),
        "stride": _pair(stride or kernel),
        "padding": _pair(padding),
        "dilation": _pair(dilation),
        "ceil": bool(ceil),
    }


def _rest(arguments: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments, with the defaults of those that are left out."""
    return (*arguments, *defaults[len(arguments) :])


def _max_pool(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    x = builder.image_or_contiguous(builder.tensor(node.args[0]), place)
    window = _window(*_rest(node.args[1:], (0, [], 0, 1, False)))
    shape = node.meta["val"][0].shape
    out = _like(builder, x, x.dtype, shape)
    # Half the memory, if nothing needs PyTorch's dtype.
    small = x.shape[2] * x.shape[3] <= _SMALL and _only_for_gradients(node)
    dtype = torch.int32 if small else torch.int64
    indices = _like(builder, x, dtype, shape)
    attributes = {**window, "indices": dtype_name(dtype)}
    builder.op("max_pool", [x], [out, indices], attributes, place=place)
    return [out, indices]


def _only_for_gradients(node: torch.fx.Node) -> bool:
    for result in node.users:
        if result.args[1] != 1:
            continue
        for user in result.users:
            if user.target in (aten.detach.default, aten.alias.default):
                return False
            if user.op != "output" and not (user.target is _MAX_BACKWARD and _are_images(user)):
                return False
    return True


def _max_pool_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    source, *window, positions = arguments[1:]
    x = builder.tensor(source)
    indices = builder.image_or_contiguous(builder.tensor(positions), place)
    out = _like(builder, indices, x.dtype, x.shape)
    gradient = builder.laid_out_like(builder.tensor(arguments[0]), indices, place)
    attributes = {**_window(*window), "input_shape": list(x.shape)}
    builder.op("max_pool_grad", [gradient, indices], [out], attributes, place=place)
    return out


def _average_attributes(
    node: torch.fx.Node, arguments: tuple[Any, ...], output: Any
) -> dict[str, Attribute]:
    if node.target in (_ADAPTIVE, _ADAPTIVE_BACKWARD):
        return {"output_size": [int(size) for size in output[2:]]}
    kernel, stride, padding, ceil, include_padding, divisor = _rest(
        arguments, (0, [], 0, False, True, None)
    )
    return {
        **_window(kernel, stride, padding, 1, ceil),
        "count_include_pad": bool(include_padding),
        "divisor": int(divisor or 0),
    }


def _average_pool(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    x = builder.tensor(node.args[0])
    shape = node.meta["val"].shape
    out = _like(builder, x, x.dtype, shape)
    attributes = _average_attributes(node, node.args[1:], shape)
    builder.op("average_pool", [x], [out], attributes, place=place)
    return out


def _average_pool_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    gradient, x = (builder.tensor(arg) for arg in node.args[:2])
    out = _like(builder, x, x.dtype, x.shape)
    attributes = _average_attributes(node, node.args[2:], gradient.shape)
    attributes["input_shape"] = list(x.shape)
    builder.op("average_pool_grad", [gradient], [out], attributes, place=place)
    return out


_LOWER = {
    _ADAPTIVE: _average_pool,
    _ADAPTIVE_BACKWARD: _average_pool_backward,
    _AVERAGE: _average_pool,
    _AVERAGE_BACKWARD: _average_pool_backward,
    _MAX: _max_pool,
    _MAX_BACKWARD: _max_pool_backward,
}
RULES: dict[Any, Rule] = {target: Rule(lower, _are_images) for target, lower in _LOWER.items()}
