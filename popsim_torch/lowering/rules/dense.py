"""Matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error
from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.aten import lower_aten
from popsim_torch.lowering.rules.reductions import reduce_over
from popsim_torch.lowering.rules.rule import HALF_AND_FLOAT, Rule, all_filled, operands
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.trace.graph.origin import precision_of
from popsim_torch.trace.serialized_products import SERIALIZED_MATMUL

aten = torch.ops.aten

# Products that PyTorch's kernels accumulate in float32: the option group of each.
_WITHOUT_HALF_PARTIALS: dict[Any, str] = {
    aten.addbmm.default: "matmul",
    aten._trilinear.default: "matmul",
    aten.conv_tbc.default: "convolution",
    aten.conv_tbc_backward.default: "convolution",
}


def _of_one_type(node: torch.fx.Node) -> bool:
    tensors = operands(node)
    return len({tensor.dtype for tensor in tensors}) == 1 and all_filled(tensors, HALF_AND_FLOAT)


def _with_float_partials(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Use PyTorch's kernel, which accumulates the products in float32.

    Raises:
        Error: The options ask for half partials, which that kernel does not support.
    """
    operator: Any = node.target
    half = getattr(builder.half_partials, _WITHOUT_HALF_PARTIALS[operator])
    if half and any(tensor.dtype == torch.float16 for tensor in operands(node)):
        raise Error(
            f"[{schema_of(operator).name}] in {place.shown} has no implementation with half "
            "partials (Options.Precision.setPartialsType(torch.half)). Use torch.matmul, torch.bmm "
            "or a convolution of torch.nn instead, or convert its operands to float32."
        )
    return lower_aten(builder, node, place)


def partials_attribute(dtype: torch.dtype, *, half: bool) -> dict[str, Attribute]:
    """Return the attribute for the partial sums of a product.

    Args:
        dtype: The dtype of the operands.
        half: Whether partial sums of float16 products are float16.
    """
    return {"partials": "half"} if half and dtype == torch.float16 else {}


def precision_attribute(precision: str | None, *operands: Tensor) -> dict[str, Attribute]:
    """Return the attribute for the bits of float32 operands that a product needs.

    Args:
        precision: ``"tf32"``, ``"bf16"``, or None for all bits.
        operands: The operands; without one of float32 there is no attribute.
    """
    if precision is None or all(t.dtype != torch.float32 for t in operands):
        return {}
    return {"precision": precision}


def _result(builder: Builder, node: torch.fx.Node) -> Tensor:
    return builder.value(node.meta["val"].dtype, node.meta["val"].shape)


def _matmul_attributes(
    builder: Builder, node: torch.fx.Node, operand: Tensor
) -> dict[str, Attribute]:
    return {
        **partials_attribute(operand.dtype, half=builder.half_partials.matmul),
        **precision_attribute(precision_of(node).matmul, operand),
    }


def _product(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    a, b = (builder.tensor(arg) for arg in node.args[:2])
    out = _result(builder, node)
    builder.op("matmul", [a, b], [out], _matmul_attributes(builder, node, a), place=place)
    return out


def _product_plus(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    bias, a, b = (builder.tensor(arg) for arg in node.args[:3])
    out = _result(builder, node)
    attributes = {**_scales(node), **_matmul_attributes(builder, node, a)}
    builder.op("matmul", [a, b, bias], [out], attributes, place=place)
    return out


def _scales(node: torch.fx.Node) -> dict[str, Attribute]:
    return {name: float(node.kwargs.get(name, 1)) for name in ("alpha", "beta")}  # type: ignore[arg-type]


def _in_half(builder: Builder, operand: Tensor, place: Place) -> Tensor:
    if operand.dtype == torch.float16:
        return operand
    half = builder.value(torch.float16, operand.shape)
    builder.op("copy", [operand], [half], {"dtype": dtype_name(torch.float16)}, place=place)
    return half


def _serialized_product(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add a product in slices; float16 sums are only for slices that are not summed in float32."""
    arguments: Any = node.args
    a, b = (builder.tensor(arg) for arg in arguments[:2])
    slices, factor, wide, dtype = arguments[2:]
    half = builder.half_partials.matmul and not wide
    if half and dtype == torch.float16:
        a, b = (_in_half(builder, operand, place) for operand in (a, b))
    half = half and a.dtype == b.dtype
    attributes: dict[str, Attribute] = {
        "slices": slices,
        "factor": factor,
        "wide_sums": wide,
        "dtype": dtype_name(dtype),
        **partials_attribute(a.dtype, half=half),
        **precision_attribute(precision_of(node).matmul, a, b),
    }
    out = _result(builder, node)
    builder.op("serialized_matmul", [a, b], [out], attributes, place=place)
    return out


def _vector_product(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Lower a product with a vector as a product with a matrix of one column."""
    *bias, a, b = (builder.tensor(arg) for arg in node.args)
    if len(a.shape) == 1:
        a = builder.graph.add_view(a, (1, *a.shape), (1, *a.strides), a.offset)
    out = _result(builder, node)
    rows = (a.shape[0], 1)
    inputs = [a, *(_column(builder, tensor) for tensor in (b, *bias))]
    attributes = {**(_scales(node) if bias else {}), **_matmul_attributes(builder, node, a)}
    seen = builder.graph.add_view(out, rows, (1, 1), 0)
    builder.op("matmul", inputs, [seen], attributes, place=place)
    return out


def _column(builder: Builder, tensor: Tensor) -> Tensor:
    return builder.graph.add_view(tensor, (*tensor.shape, 1), (*tensor.strides, 1), tensor.offset)


def _convolution_attributes(
    builder: Builder, node: torch.fx.Node, operand: Tensor, arguments: tuple[Any, ...]
) -> dict[str, Any]:
    stride, padding, dilation, transposed, output_padding, groups = arguments
    return {
        "stride": [int(v) for v in stride],
        "padding": [int(v) for v in padding],
        "dilation": [int(v) for v in dilation],
        "output_padding": [int(v) for v in output_padding],
        "transposed": bool(transposed),
        "groups": int(groups),
        **partials_attribute(operand.dtype, half=builder.half_partials.convolution),
        **precision_attribute(precision_of(node).convolution, operand),
    }


def _image(
    builder: Builder,
    like: torch.Tensor | Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
) -> Tensor:
    """Add the result of a convolution, with channels last if the kernels support it."""
    _stride, _padding, _dilation, transposed, _output_padding, groups = arguments
    shape = tuple(int(size) for size in like.shape)
    if len(shape) == 4 and not transposed:
        return builder.image(like.dtype, shape)
    if len(shape) == 5 and not transposed and groups > 1 and weight.shape[:2] == (groups, 1):
        batch, channels, *sizes = shape
        root = builder.value(like.dtype, (batch, *sizes, channels))
        first, *between, last = root.strides
        return builder.graph.add_view(root, shape, (first, last, *between), 0)
    return builder.value(like.dtype, shape)


def _convolution(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    x, weight, bias = node.args[:3]
    inputs = [builder.tensor(x), builder.tensor(weight)]
    if bias is not None:
        inputs.append(builder.tensor(bias))
    out = _image(builder, node.meta["val"], inputs[1], node.args[3:9])
    attributes = _convolution_attributes(builder, node, inputs[0], node.args[3:9])
    builder.op("convolution", inputs, [out], attributes, place=place)
    return out


def _convolution_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    gradient, x, weight = (builder.tensor(arg) for arg in node.args[:3])
    attributes = _convolution_attributes(builder, node, gradient, node.args[4:10])
    mask: Any = node.args[10]
    used = builder.used_results(node)
    for_x = for_weight = for_bias = None
    if mask[0] and 0 in used:
        for_x = _image(builder, x, weight, node.args[4:10])
        builder.op(
            "convolution_grad_input",
            [gradient, weight],
            [for_x],
            {**attributes, "input_shape": list(x.shape)},
            place=place,
        )
    if mask[1] and 1 in used:
        for_weight = builder.value(weight.dtype, weight.shape)
        builder.op(
            "convolution_grad_weight",
            [gradient, x],
            [for_weight],
            {**attributes, "weight_shape": list(weight.shape)},
            place=place,
        )
    if mask[2] and 2 in used:
        # Every other axis is summed: the length of the sum is the number of images times positions.
        axes = [axis for axis in range(len(gradient.shape)) if axis != 1]
        for_bias = reduce_over(builder, gradient, node.meta["val"][2], "sum", axes, place)
    return [for_x, for_weight, for_bias]


_LOWER: dict[Any, Any] = {
    aten.addmm.default: _product_plus,
    aten.addmv.default: _vector_product,
    aten.baddbmm.default: _product_plus,
    aten.bmm.default: _product,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.dot.default: _vector_product,
    aten.mm.default: _product,
    aten.mv.default: _vector_product,
    aten.vdot.default: _vector_product,
}
RULES: dict[Any, Rule] = {
    SERIALIZED_MATMUL: Rule(_serialized_product),
    **{target: Rule(lower, _of_one_type) for target, lower in _LOWER.items()},
    **{target: Rule(_with_float_partials) for target in _WITHOUT_HALF_PARTIALS},
}
