"""Batch norm: elementwise ops after the statistics of the batch are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import InternalError
from popsim_torch.ir import Tensor
from popsim_torch.ir.map_code import MapCode
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.lowering.rules.aten import lower_aten
from popsim_torch.lowering.rules.rule import HALF_AND_FLOAT, Rule, all_filled, operands

aten = torch.ops.aten

_FIXED = aten._native_batch_norm_legit_no_training.default
_TRAINING = aten._native_batch_norm_legit_functional.default
_WITHOUT_RUNNING = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default
# Index of the argument that says whether the statistics of the batch are used.
_USES_BATCH: dict[Any, int] = {_TRAINING: 5, _WITHOUT_RUNNING: 3, _BACKWARD: 7}


def ignores(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Return whether a node has an input that it does not use.

    Batch norm's backward has the running statistics as inputs, but uses them in eval mode only.
    """
    return node.target is _BACKWARD and _uses_batch(node) and source in node.args[3:5]


def _uses_batch(node: torch.fx.Node) -> bool:
    return node.args[_USES_BATCH[node.target]] is True


def _is_computed(node: torch.fx.Node) -> bool:
    return all_filled(operands(node), HALF_AND_FLOAT)


def _is_computed_of_batch(node: torch.fx.Node) -> bool:
    return _uses_batch(node) and _is_computed(node)


def _per_channel(builder: Builder, vector: Tensor, rank: int) -> Tensor:
    """Return a per-channel vector in a shape that broadcasts over ``[N, C, ...]``."""
    missing = [1] * (rank - 2)
    shape, strides = (*vector.shape, *missing), (*vector.strides, *missing)
    return builder.graph.add_view(vector, shape, strides, vector.offset)


def _vectors(
    builder: Builder, nodes: Sequence[torch.fx.Node | None], place: Place
) -> list[Tensor | None]:
    return [None if n is None else builder.contiguous(builder.tensor(n), place) for n in nodes]


def _training(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    source, weight, bias = arguments[:3]
    running = arguments[3:5] if node.target is _TRAINING else (None, None)
    momentum, epsilon = arguments[-2:]
    results = node.meta["val"]
    x = builder.image_or_contiguous(builder.tensor(source), place)
    channels = (x.shape[1],)
    statistics: list[Tensor | None] = [builder.value(r.dtype, channels) for r in results[1:3]]
    scale = builder.value(torch.float32, channels)
    changed: list[Tensor | None] = [None, None]
    if running[0] is not None:
        changed = [builder.value(r.dtype, channels) for r in results[3:5]]
    builder.op(
        "batch_norm_statistics",
        [x, *_vectors(builder, [weight, *running], place)],
        [*statistics, scale, *changed],
        {"momentum": float(momentum), "epsilon": float(epsilon)},
        place=place,
    )
    code, rank = MapCode(), len(x.shape)
    mean = statistics[0]
    if mean is None:
        raise InternalError("batch norm: no mean")
    value = code("sub", x, _per_channel(builder, mean, rank))
    value = code("mul", value, _per_channel(builder, scale, rank))
    if bias is not None:
        value = code("add", value, _per_channel(builder, builder.tensor(bias), rank))
    out = emit_map(builder, code, value, results[0].dtype, x.shape, place)
    return [out, *statistics, *changed][: len(results)]


def _backward(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    if _is_computed_of_batch(node):
        return _backward_of_batch(builder, node, place)
    if _uses_batch(node):
        node.args = (*node.args[:3], None, None, *node.args[5:])
    return lower_aten(builder, node, place)


def _backward_of_batch(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    gradient, source, weight, _, _, saved_mean, saved_deviation, _, _, _mask = arguments
    used = builder.used_results(node)
    x = builder.image_or_contiguous(builder.tensor(source), place)
    grad_y = builder.laid_out_like(builder.tensor(gradient), x, place)
    mean, deviation, scale = _vectors(builder, [saved_mean, saved_deviation, weight], place)
    channels = (x.shape[1],)
    for_vectors = [
        builder.value(node.meta["val"][i].dtype, channels) if i in used else None for i in (1, 2)
    ]
    factors: list[Tensor | None] = [None] * 3
    if 0 in used:
        factors = [builder.value(torch.float32, channels) for _ in range(3)]
    builder.op(
        "batch_norm_grad",
        [grad_y, x, mean, deviation, scale],
        [*for_vectors, *factors],
        place=place,
    )
    if 0 not in used:
        return [None, *for_vectors]
    of_gradient, of_deviation, shift, mean = (
        _per_channel(builder, f, len(x.shape)) for f in [*factors, mean] if f is not None
    )
    code = MapCode()
    value = code("mul", code("sub", x, mean), of_deviation)
    value = code("add", value, code("mul", grad_y, of_gradient))
    value = code("add", value, shift)
    for_x = emit_map(builder, code, value, node.meta["val"][0].dtype, x.shape, place)
    return [for_x, *for_vectors]


def _fixed(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Normalise with the running statistics.

    Returns:
        The normalised tensor, and two empty results instead of the batch's statistics, which eval
        mode does not compute.
    """
    arguments: Any = node.args
    source, weight, bias, mean, variance, _momentum, epsilon = arguments
    x = builder.tensor(source)
    value: torch.Tensor = node.meta["val"][0]
    if builder.channels_last(x) is None:
        factors = MapCode()
        scale, shift = _fixed_factors(builder, factors, [weight, bias, mean, variance], epsilon, x)
        result = factors("add", factors("mul", x, scale), shift)
        out = emit_map(builder, factors, result, value.dtype, value.shape, place)
    else:
        out = _fixed_image(builder, x, [weight, bias, mean, variance], epsilon, value.dtype, place)
    unused = [
        builder.constant(torch.zeros(r.shape, dtype=r.dtype, device="cpu"))
        for r in node.meta["val"][1:]
    ]
    return [out, *unused]


def _fixed_factors(
    builder: Builder,
    code: MapCode,
    nodes: Sequence[torch.fx.Node | None],
    epsilon: float,
    x: Tensor | None,
) -> tuple[Any, Any]:
    """Add the instructions for scale and shift, on vectors that broadcast over ``x``."""

    def vector(node: torch.fx.Node) -> Tensor:
        tensor = builder.tensor(node)
        return tensor if x is None else _per_channel(builder, tensor, len(x.shape))

    weight, bias, mean, variance = nodes
    if mean is None or variance is None:
        raise InternalError("batch norm: no running statistics")
    scale = code("div", 1.0, code("sqrt", code("add", vector(variance), epsilon)))
    if weight is not None:
        scale = code("mul", scale, vector(weight))
    shift = code("neg", code("mul", vector(mean), scale))
    if bias is not None:
        shift = code("add", vector(bias), shift)
    return scale, shift


def _fixed_image(
    builder: Builder,
    x: Tensor,
    nodes: Sequence[torch.fx.Node | None],
    epsilon: float,
    dtype: torch.dtype,
    place: Place,
) -> Tensor:
    """Normalise a tensor with channels last.

    In this layout the factors change from element to element, so they are computed in advance.
    """
    channels = (x.shape[1],)
    factors = []
    for index in range(2):
        code = MapCode()
        factor = _fixed_factors(builder, code, nodes, epsilon, None)[index]
        factors.append(emit_map(builder, code, factor, torch.float32, channels, place))
    scale, shift = (_per_channel(builder, factor, len(x.shape)) for factor in factors)
    code = MapCode()
    result = code("add", code("mul", x, scale), shift)
    return emit_map(builder, code, result, dtype, x.shape, place)


RULES: dict[Any, Rule] = {
    _FIXED: Rule(_fixed, _is_computed),
    _TRAINING: Rule(_training, _is_computed_of_batch),
    _WITHOUT_RUNNING: Rule(_training, _is_computed_of_batch),
    _BACKWARD: Rule(_backward),
}
