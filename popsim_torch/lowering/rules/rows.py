"""Norms, softmax, losses over classes and embeddings: operators that work row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import FLOATING, Rule, all_filled, operands
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.trace.ctc import CTC_LOSS, CTC_LOSS_GRAD

aten = torch.ops.aten

_LABELS = frozenset({torch.int32, torch.int64})
_REDUCTIONS = ("none", "mean", "sum")  # by the number of torch's enum


def _given(builder: Builder, argument: Any) -> Tensor | None:
    return builder.tensor(argument) if isinstance(argument, torch.fx.Node) else None


def _read_results(builder: Builder, node: torch.fx.Node) -> list[Tensor | None]:
    """Add a tensor for each result that is read."""
    used = builder.used_results(node)
    return [
        builder.value(result.dtype, result.shape) if index in used and result is not None else None
        for index, result in enumerate(node.meta["val"])
    ]


def _all_floating(node: torch.fx.Node) -> bool:
    return all_filled(operands(node), FLOATING)


def _layer_norm(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    x, shape, weight, bias, epsilon = arguments
    inputs = [_given(builder, argument) for argument in (x, weight, bias)]
    outputs = _read_results(builder, node)
    attributes: dict[str, Attribute] = {
        "axes": len(shape),
        "epsilon": float(epsilon),
    }
    builder.op("layer_norm", inputs, outputs, attributes, place=place)
    return outputs


def _layer_norm_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    gradient, x, shape, mean, rstd, weight, _bias, _mask = arguments
    inputs = [_given(builder, argument) for argument in (gradient, x, mean, rstd, weight)]
    outputs = _read_results(builder, node)
    builder.op("layer_norm_grad", inputs, outputs, {"axes": len(shape)}, place=place)
    return outputs


def _group_norm(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    x, weight, bias, _n, _c, _pixels, groups, epsilon = arguments
    inputs = [_given(builder, argument) for argument in (x, weight, bias)]
    outputs = _read_results(builder, node)
    attributes: dict[str, Attribute] = {
        "groups": int(groups),
        "epsilon": float(epsilon),
        "statistics": dtype_name(node.meta["val"][1].dtype),
    }
    builder.op("group_norm", inputs, outputs, attributes, place=place)
    return outputs


def _group_norm_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    gradient, x, mean, rstd, weight, _n, _c, _pixels, groups, _mask = arguments
    inputs = [_given(builder, argument) for argument in (gradient, x, mean, rstd, weight)]
    outputs = _read_results(builder, node)
    attributes: dict[str, Attribute] = {"groups": int(groups)}
    builder.op("group_norm_grad", inputs, outputs, attributes, place=place)
    return outputs


def _softmax(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    x, axis = node.args[:2]
    attributes = {
        "log": node.target is aten._log_softmax.default,
        "safe": node.target is aten._safe_softmax.default,
    }
    return _over_axis(builder, node, "softmax", [x], axis, attributes, place)


def _softmax_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    gradient, y, axis, _dtype = arguments
    attributes = {"log": node.target is aten._log_softmax_backward_data.default}
    return _over_axis(builder, node, "softmax_grad", [gradient, y], axis, attributes, place)


def _over_axis(
    builder: Builder,
    node: torch.fx.Node,
    kind: str,
    sources: list[Any],
    axis: Any,
    flags: Mapping[str, bool],
    place: Place,
) -> Tensor:
    value = node.meta["val"]
    inputs = [builder.tensor(source) for source in sources]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {
        "axis": int(axis) % value.dim(),
        "dtype": dtype_name(value.dtype),
        **flags,
    }
    builder.op(kind, inputs, [out], attributes, place=place)
    return out


def _has_axes(node: torch.fx.Node) -> bool:
    return _all_floating(node) and node.meta["val"].dim() > 0


def _nll_loss(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    x, labels, weights, reduction, ignored = arguments
    inputs = [_given(builder, argument) for argument in (x, labels, weights)]
    outputs = _read_results(builder, node)
    attributes: dict[str, Attribute] = {
        "reduction": _REDUCTIONS[reduction],
        "ignore_index": int(ignored),
    }
    builder.op("nll_loss", inputs, outputs, attributes, place=place)
    return outputs


def _nll_loss_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    gradient, _x, labels, weights, reduction, ignored, total = arguments
    inputs = [_given(builder, argument) for argument in (gradient, total, labels, weights)]
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {
        "reduction": _REDUCTIONS[reduction],
        "ignore_index": int(ignored),
        "classes": int(value.shape[1]),
        "dtype": dtype_name(value.dtype),
    }
    builder.op("nll_loss_grad", inputs, [out], attributes, place=place)
    return out


def _has_rows_of_classes(x: Any, labels: Any, others: list[Any]) -> bool:
    floating = [tensor.meta["val"] for tensor in (x, *others) if tensor is not None]
    return (
        x.meta["val"].dim() == 2
        and labels.meta["val"].dim() == 1
        and all_filled([labels.meta["val"]], _LABELS)
        and all_filled(floating, FLOATING)
    )


def _nll_loss_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    x, labels, weights, _reduction, _ignored = arguments
    return _has_rows_of_classes(x, labels, [weights])


def _nll_loss_backward_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    gradient, x, labels, weights, _reduction, _ignored, total = arguments
    return _has_rows_of_classes(x, labels, [gradient, weights, total])


def _ctc_loss(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    inputs, attributes = _ctc_operands(builder, node)
    outputs = _read_results(builder, node)
    builder.op("ctc_loss", inputs, outputs, attributes, place=place)
    return outputs


def _ctc_loss_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    inputs, attributes = _ctc_operands(builder, node)
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    builder.op("ctc_loss_grad", inputs, [out], attributes, place=place)
    return out


def _ctc_operands(
    builder: Builder, node: torch.fx.Node
) -> tuple[list[Tensor], dict[str, Attribute]]:
    *tensors, blank, zero_infinity = node.args
    inputs = [builder.tensor(tensor) for tensor in tensors]
    return inputs, {"blank": int(blank), "zero_infinity": bool(zero_infinity)}  # type: ignore[arg-type]


def _embedding(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    table, indices = (builder.tensor(argument) for argument in node.args[:2])
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    builder.op("embedding", [builder.contiguous(table, place), indices], [out], place=place)
    return out


def _embedding_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    gradient, indices = (builder.tensor(argument) for argument in node.args[:2])
    num_rows, padding, _scale = node.args[2:]
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {
        "rows": int(num_rows),  # type: ignore[arg-type]
        "padding_index": int(padding),  # type: ignore[arg-type]
    }
    builder.op("embedding_grad", [gradient, indices], [out], attributes, place=place)
    return out


def _embedding_supported(node: torch.fx.Node) -> bool:
    source, indices = operands(node)
    floating = node.meta["val"].dtype in FLOATING
    return floating and source.numel() > 0 and all_filled([indices], _LABELS)


def _embedding_backward_supported(node: torch.fx.Node) -> bool:
    scale_by_frequency = node.args[4]
    return not scale_by_frequency and _embedding_supported(node)


_BAG_MODES = ("sum", "mean", "max")  # by the number in PyTorch's operators


def _embedding_bag(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = _with_defaults(node)
    table, indices, offsets, _scale, mode, _sparse, weights, last, padding = arguments
    inputs = [_given(builder, argument) for argument in (table, indices, offsets, weights)]
    rows = node.meta["val"][0]
    used = builder.used_results(node)
    bags = rows.shape[:1]
    shapes = (rows.shape, inputs[1].shape, bags, rows.shape if mode == 2 else bags)  # type: ignore[union-attr]
    outputs = [
        builder.value(rows.dtype if i == 0 else torch.int64, shape) if i in used else None
        for i, shape in enumerate(shapes)
    ]
    outputs[0] = outputs[0] or builder.value(rows.dtype, rows.shape)
    attributes: dict[str, Attribute] = {
        "mode": _BAG_MODES[mode],
        "padding_index": int(padding),
        "include_last_offset": bool(last),
    }
    builder.op("embedding_bag", inputs, outputs, attributes, place=place)
    return outputs


def _embedding_bag_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = _with_defaults(node)
    gradient, indices, offsets, _bags, _sizes, largest, num_rows, _scale, mode, *rest = arguments
    _sparse, weights, padding = rest
    inputs = [
        _given(builder, argument)
        for argument in (gradient, indices, offsets, largest if mode == 2 else None, weights)
    ]
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {
        "rows": int(num_rows),
        "mode": _BAG_MODES[mode],
        "padding_index": int(padding),
    }
    builder.op("embedding_bag_grad", inputs, [out], attributes, place=place)
    return out


def _bag_weights_backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = _with_defaults(node)
    gradient, table, indices, offsets, _bags, _mode, padding = arguments
    inputs = [_given(builder, argument) for argument in (gradient, table, indices, offsets)]
    value = node.meta["val"]
    out = builder.value(value.dtype, inputs[2].shape)  # type: ignore[union-attr]
    attributes: dict[str, Attribute] = {"padding_index": int(padding)}
    builder.op("embedding_bag_weights_grad", inputs, [out], attributes, place=place)
    return out


def _with_defaults(node: torch.fx.Node) -> list[Any]:
    """Return the arguments of a node in the order of its schema, defaults filled in."""
    target: Any = node.target
    values: list[Any] = []
    for position, argument in enumerate(schema_of(target).arguments):
        default = argument.default_value if argument.has_default_value() else None
        given = node.args[position] if position < len(node.args) else default
        values.append(node.kwargs.get(argument.name, given))
    return values


def _bag_supported(node: torch.fx.Node) -> bool:
    arguments: Any = _with_defaults(node)
    table, indices, offsets, by_frequency, _mode, _sparse, weights = arguments[:7]
    floats = [t.meta["val"] for t in (table, weights) if t is not None]
    return not by_frequency and _are_bags(floats, indices, offsets)


def _bag_backward_supported(node: torch.fx.Node) -> bool:
    arguments: Any = _with_defaults(node)
    gradient, indices, offsets, *_ = arguments
    by_frequency, weights = arguments[7], arguments[10]
    floats = [t.meta["val"] for t in (gradient, weights) if t is not None]
    return not by_frequency and _are_bags(floats, indices, offsets)


def _bag_weights_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    gradient, table, indices, offsets = arguments[:4]
    return _are_bags([gradient.meta["val"], table.meta["val"]], indices, offsets)


def _are_bags(floats: list[torch.Tensor], indices: Any, offsets: Any) -> bool:
    numbers = [indices.meta["val"], offsets.meta["val"]]
    return (
        all_filled(floats, FLOATING)
        and len({tensor.dtype for tensor in floats}) == 1
        and all_filled(numbers, _LABELS)
        and all(tensor.dim() == 1 for tensor in numbers)
    )


RULES: dict[Any, Rule] = {
    CTC_LOSS: Rule(_ctc_loss),
    CTC_LOSS_GRAD: Rule(_ctc_loss_backward),
    aten._embedding_bag.default: Rule(_embedding_bag, _bag_supported),
    aten._embedding_bag_backward.default: Rule(_embedding_bag_backward, _bag_backward_supported),
    aten._embedding_bag_forward_only.default: Rule(_embedding_bag, _bag_supported),
    aten._embedding_bag_per_sample_weights_backward.default: Rule(
        _bag_weights_backward, _bag_weights_supported
    ),
    aten._log_softmax.default: Rule(_softmax, _has_axes),
    aten._log_softmax_backward_data.default: Rule(_softmax_backward, _has_axes),
    aten._safe_softmax.default: Rule(_softmax, _has_axes),
    aten._softmax.default: Rule(_softmax, _has_axes),
    aten._softmax_backward_data.default: Rule(_softmax_backward, _has_axes),
    aten.embedding.default: Rule(_embedding, _embedding_supported),
    aten.embedding_dense_backward.default: Rule(_embedding_backward, _embedding_backward_supported),
    aten.native_group_norm.default: Rule(_group_norm, _all_floating),
    aten.native_group_norm_backward.default: Rule(_group_norm_backward, _all_floating),
    aten.native_layer_norm.default: Rule(_layer_norm, _all_floating),
    aten.native_layer_norm_backward.default: Rule(_layer_norm_backward, _all_floating),
    aten.nll_loss_backward.default: Rule(_nll_loss_backward, _nll_loss_backward_supported),
    aten.nll_loss_forward.default: Rule(_nll_loss, _nll_loss_supported),
}
