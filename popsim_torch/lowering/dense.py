"""Matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch._native import has_onednn
from popsim_torch.ir import Tensor
from popsim_torch.lowering.builder import Builder, Place, Value

aten = torch.ops.aten

_FLOATING = frozenset({torch.float16, torch.float32})


def is_dense(node: torch.fx.Node) -> bool:
    """Whether the device has an op of its own for a matrix product or convolution node."""
    if node.target not in RULES:
        return False
    tensors = [n.meta["val"] for n in node.all_input_nodes]
    same_dtype = len({t.dtype for t in tensors}) == 1
    return same_dtype and tensors[0].dtype in _FLOATING and all(t.numel() > 0 for t in tensors)


def lower_dense(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add the op for a node."""
    value: Value = RULES[node.target](builder, node, place)
    return value


def _result(builder: Builder, node: torch.fx.Node) -> Tensor:
    return builder.value(node.meta["val"].dtype, node.meta["val"].shape)


def _product(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    a, b = (builder.tensor(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    out = _result(builder, node)
    builder.op("matmul", [a, b], [out], place=place)
    return out


def _product_plus(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    bias, a, b = (builder.tensor(arg) for arg in node.args[:3])  # type: ignore[arg-type]
    out = _result(builder, node)
    attributes = {
        "alpha": float(node.kwargs.get("alpha", 1)),  # type: ignore[arg-type]
        "beta": float(node.kwargs.get("beta", 1)),  # type: ignore[arg-type]
    }
    builder.op("matmul", [a, b, bias], [out], attributes, place=place)
    return out


def _convolution_attributes(arguments: tuple[Any, ...]) -> dict[str, Any]:
    stride, padding, dilation, transposed, output_padding, groups = arguments
    return {
        "stride": [int(v) for v in stride],
        "padding": [int(v) for v in padding],
        "dilation": [int(v) for v in dilation],
        "output_padding": [int(v) for v in output_padding],
        "transposed": bool(transposed),
        "groups": int(groups),
    }


def _image(builder: Builder, like: torch.Tensor | Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Add the result of a convolution, with its channels last where that is faster."""
    _stride, _padding, _dilation, transposed, _output_padding, groups = arguments
    shape = tuple(like.shape)
    if has_onednn() and len(shape) == 4 and not transposed and groups == 1:
        return builder.image(like.dtype, shape)
    return builder.value(like.dtype, shape)


def _convolution(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    x, weight, bias = node.args[:3]
    inputs = [builder.tensor(x), builder.tensor(weight)]  # type: ignore[arg-type]
    if bias is not None:
        inputs.append(builder.tensor(bias))  # type: ignore[arg-type]
    out = _image(builder, node.meta["val"], node.args[3:9])
    builder.op("convolution", inputs, [out], _convolution_attributes(node.args[3:9]), place=place)
    return out


def _convolution_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    gradient, x, weight = (builder.tensor(arg) for arg in node.args[:3])  # type: ignore[arg-type]
    attributes = _convolution_attributes(node.args[4:10])
    mask: Any = node.args[10]
    used = builder.used_results(node)
    for_x = for_weight = for_bias = None
    if mask[0] and 0 in used:
        for_x = _image(builder, x, node.args[4:10])
        builder.op(
            "convolution_grad_input",
            [gradient, weight],
            [for_x],
            {**attributes, "input_shape": list(x.shape)},
            place=place,
        )
    with_bias = bool(mask[2]) and 2 in used
    if (mask[1] and 1 in used) or with_bias:
        for_weight = builder.value(weight.dtype, weight.shape)
        outputs = [for_weight]
        if with_bias:
            channels = gradient.shape[1]
            for_bias = builder.value(weight.dtype, (channels,))
            outputs.append(for_bias)
        builder.op(
            "convolution_grad_weight",
            [gradient, x],
            outputs,
            {**attributes, "weight_shape": list(weight.shape), "bias": with_bias},
            place=place,
        )
    return [for_x, for_weight, for_bias]


RULES: dict[Any, Any] = {
    aten.addmm.default: _product_plus,
    aten.baddbmm.default: _product_plus,
    aten.bmm.default: _product,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.mm.default: _product,
}
