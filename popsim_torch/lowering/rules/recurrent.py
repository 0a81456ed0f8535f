"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import torch.fx

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.dense import partials_attribute, precision_attribute
from popsim_torch.lowering.rules.rule import Rule
from popsim_torch.trace.graph.origin import precision_of
from popsim_torch.trace.recurrent import RECURRENT, RECURRENT_GRAD

# The results of the operator.
_Y, _H, _C, _GATES, _STATE = range(5)
_BIASES = (5, 6)  # results of its backward


def _split(
    builder: Builder, node: torch.fx.Node
) -> tuple[list[Tensor | None], dict[str, Attribute]]:
    """Return the op's inputs and attributes."""
    *operands, mode, reverse = node.args
    # In the trace, an empty tensor replaces an input that the kind of layer does not have.
    inputs = [
        builder.tensor(operand)
        if isinstance(operand, torch.fx.Node) and operand.meta["val"].numel() > 0
        else None
        for operand in operands
    ]
    given = [tensor for tensor in inputs if tensor is not None]
    partials = partials_attribute(given[0].dtype, half=builder.half_partials.matmul)
    precision = precision_of(node)
    # PyTorch computes the other layers as matrix products.
    needed = precision.lstm if mode == "lstm" else precision.matmul
    return inputs, {
        "mode": str(mode),
        "reverse": bool(reverse),
        **partials,
        **precision_attribute(needed, *given),
    }


def _layer(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    inputs, attributes = _split(builder, node)
    results: Any = node.meta["val"]
    used = builder.used_results(node)

    def output(index: int, *readers: int) -> Tensor | None:
        result = results[index]
        wanted = result.numel() > 0 and not used.isdisjoint(readers)
        return builder.value(result.dtype, result.shape) if wanted else None

    y = output(_Y, *range(5))
    assert y is not None
    gates = output(_GATES, _GATES)
    state = output(_STATE, _STATE, _C)
    builder.op("recurrent", inputs, [y, gates, state], attributes, place=place)
    step = 0 if attributes["reverse"] else y.shape[0] - 1
    c = None if state is None or results[_C].numel() == 0 else _at_step(builder, state, step)
    return [y, _at_step(builder, y, step), c, gates, state]


def _at_step(builder: Builder, sequence: Tensor, step: int) -> Tensor:
    _, *shape = sequence.shape
    stride, *strides = sequence.strides
    return builder.graph.add_view(sequence, shape, strides, sequence.offset + step * stride)


def _gradients(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    inputs, attributes = _split(builder, node)
    used = builder.used_results(node)
    if attributes["mode"] != "gru" and not used.isdisjoint(_BIASES):
        # Both biases are added to the same sums.
        used = (used - set(_BIASES)) | {_BIASES[0]}
    results: list[Tensor | None] = [
        builder.value(result.dtype, result.shape) if i in used else None
        for i, result in enumerate(node.meta["val"])
    ]
    builder.op("recurrent_grad", inputs, results, attributes, place=place)
    first = results[_BIASES[0]]
    if attributes["mode"] != "gru" and first is not None:
        results[_BIASES[1]] = builder.graph.add_view(first, first.shape, first.strides, 0)
    return results


RULES: dict[Any, Rule] = {RECURRENT: Rule(_layer), RECURRENT_GRAD: Rule(_gradients)}
