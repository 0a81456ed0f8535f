"""Losses that compare two tensors element by element, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Tensor
from popsim_torch.ir.map_code import Formula, MapCode, MapValue
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.emit.checks import check_range
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.lowering.rules.reductions import reduce_all
from popsim_torch.lowering.rules.rule import HALF_AND_FLOAT, Rule, all_filled, operands
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.typed_torch import broadcast_shapes

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # values of torch's enum of reductions


def _squared(code: MapCode, x: Tensor, y: Tensor) -> MapValue:
    difference = code("sub", x, y)
    return code("mul", difference, difference)


def _squared_slope(code: MapCode, x: Tensor, y: Tensor, factor: float) -> MapValue:
    return code("mul", 2.0 * factor, code("sub", x, y))


def _smooth_l1(code: MapCode, x: Tensor, y: Tensor, beta: float) -> MapValue:
    size = code("abs", code("sub", x, y))
    near = code("div", code("mul", code("mul", 0.5, size), size), beta)
    return code("where", code("lt", size, beta), near, code("sub", size, 0.5 * beta))


def _smooth_l1_slope(code: MapCode, x: Tensor, y: Tensor, factor: float, beta: float) -> MapValue:
    difference = code("sub", x, y)
    far = code("gt", code("abs", difference), beta)
    slope = code("where", far, code("sign", difference), code("div", difference, beta))
    return code("mul", factor, slope)


def _huber(code: MapCode, x: Tensor, y: Tensor, delta: float) -> MapValue:
    size = code("abs", code("sub", x, y))
    near = code("mul", code("mul", 0.5, size), size)
    far = code("mul", delta, code("sub", size, 0.5 * delta))
    return code("where", code("le", size, delta), near, far)


def _huber_slope(code: MapCode, x: Tensor, y: Tensor, factor: float, delta: float) -> MapValue:
    return code("mul", factor, code("clamp", code("sub", x, y), -delta, delta))


def _cross_entropy(code: MapCode, x: Tensor, y: Tensor) -> MapValue:
    # The logarithm of a probability of 0 counts as -100, as in PyTorch.
    absent = code("mul", code("sub", y, 1.0), code("max", code("log1p", code("neg", x)), -100.0))
    return code("sub", absent, code("mul", y, code("max", code("log", x), -100.0)))


def _cross_entropy_slope(code: MapCode, x: Tensor, y: Tensor, factor: float) -> MapValue:
    variance = code("max", code("mul", code("sub", 1.0, x), x), 1e-12)
    return code("mul", factor, code("div", code("sub", x, y), variance))


def _with_logits(code: MapCode, x: Tensor, y: Tensor, positive: Tensor | None = None) -> MapValue:
    decay = code("log1p", code("exp", code("neg", code("abs", x))))
    log_sigmoid = code("sub", code("min", x, 0.0), decay)
    if positive is not None:
        share = code("add", code("mul", code("sub", positive, 1.0), y), 1.0)
        log_sigmoid = code("mul", log_sigmoid, share)
    return code("sub", code("mul", code("sub", 1.0, y), x), log_sigmoid)


# The term that each element adds to the loss, or the factor of the loss's gradient; the latter also
# includes the factor of a mean. Parameters of the loss come last. (PyTorch itself expresses the
# gradient of the loss with logits by other operators.)
_ERRORS: dict[Any, Formula] = {
    aten.binary_cross_entropy.default: _cross_entropy,
    aten.binary_cross_entropy_with_logits.default: _with_logits,
    aten.huber_loss.default: _huber,
    aten.mse_loss.default: _squared,
    aten.smooth_l1_loss.default: _smooth_l1,
}
_SLOPES: dict[Any, Formula] = {
    aten.binary_cross_entropy_backward.default: _cross_entropy_slope,
    aten.huber_loss_backward.default: _huber_slope,
    aten.mse_loss_backward.default: _squared_slope,
    aten.smooth_l1_loss_backward.default: _smooth_l1_slope,
}
_NUMBERS = ("beta", "delta")


def _is_mapped(node: torch.fx.Node) -> bool:
    return all_filled(operands(node), HALF_AND_FLOAT)


def _loss(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add a ``map`` op for a node, and a ``reduce`` op for a loss with a reduction."""
    operator: Any = node.target
    arguments: dict[str, Any] = {a.name: a.default_value for a in schema_of(operator).arguments}
    arguments.update(zip(arguments, node.args, strict=False))
    arguments.update(node.kwargs)
    tensors = {
        name: builder.tensor(value)
        for name, value in arguments.items()
        if isinstance(value, torch.fx.Node)
    }
    reduction = arguments["reduction"]
    parameters: list[Any] = [float(arguments[name]) for name in _NUMBERS if name in arguments]
    if "pos_weight" in tensors:
        parameters.append(tensors["pos_weight"])
    value, code = node.meta["val"], MapCode()
    x, y = tensors["self"], tensors["target"]
    if node.target in _SLOPES:
        factor = 1.0 / value.numel() if reduction == _MEAN else 1.0
        slope = _weighted(code, _SLOPES[node.target](code, x, y, factor, *parameters), tensors)
        result = code("mul", slope, tensors["grad_output"])
        return emit_map(builder, code, result, value.dtype, value.shape, place)
    if operator is aten.binary_cross_entropy.default:
        _check_probabilities(builder, x, y, place)
    result = _weighted(code, _ERRORS[node.target](code, x, y, *parameters), tensors)
    if reduction == _NONE:
        return emit_map(builder, code, result, value.dtype, value.shape, place)
    shapes = (tensor.shape for tensor in tensors.values())
    shape = broadcast_shapes(*shapes)
    errors = emit_map(builder, code, result, torch.float32, shape, place)
    return reduce_all(builder, errors, value, "mean" if reduction == _MEAN else "sum", place)


def _check_probabilities(builder: Builder, x: Tensor, y: Tensor, place: Place) -> None:
    """Check what eager PyTorch checks, so that no loss is silently NaN."""
    problem = "binary_cross_entropy: all elements of {} should be between 0 and 1. {}"
    advice = (
        "Pass probabilities, such as torch.sigmoid(x), or use binary_cross_entropy_with_logits. "
        "Numbers that are NaN fail, too."
    )
    check_range(builder, x, 0.0, 1.0, problem.format("input", advice), place)
    advice = "The labels of two classes are 0 or 1."
    check_range(builder, y, 0.0, 1.0, problem.format("target", advice), place)


def _weighted(code: MapCode, value: MapValue, tensors: dict[str, Tensor]) -> MapValue:
    return code("mul", value, tensors["weight"]) if "weight" in tensors else value


RULES: dict[Any, Rule] = {target: Rule(_loss, _is_mapped) for target in (*_ERRORS, *_SLOPES)}
