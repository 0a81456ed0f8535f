"""Searches over points and labels: one op each."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Rule
from popsim_torch.searches.operators import CTC_BEAM_SEARCH, FPS, NEAREST


def _fps(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    points, starts, bounds, counts = arguments
    attributes: dict[str, Attribute] = {
        "bounds": [int(bound) for bound in bounds],
        "counts": [int(count) for count in counts],
    }
    return _rows(builder, node, "fps", (points, starts), attributes, place)


def _nearest(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    return _rows(builder, node, "nearest", node.args, {}, place)


def _rows(
    builder: Builder,
    node: torch.fx.Node,
    kind: str,
    operands: tuple[Any, ...],
    attributes: dict[str, Attribute],
    place: Place,
) -> Value:
    """Add an op that returns row numbers."""
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    inputs = [None if operand is None else builder.tensor(operand) for operand in operands]
    builder.op(kind, inputs, [out], attributes, place=place)
    return out


def _beam_search(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    log_probs, lengths, blank, beam_width, top_paths = arguments
    inputs = [builder.tensor(log_probs), builder.tensor(lengths)]
    used = builder.used_results(node)
    outputs = [
        builder.value(result.dtype, result.shape) if index in used else None
        for index, result in enumerate(node.meta["val"])
    ]
    attributes: dict[str, Attribute] = {
        "blank": int(blank),
        "beam_width": int(beam_width),
        "top_paths": int(top_paths),
    }
    builder.op("ctc_beam_search", inputs, outputs, attributes, place=place)
    return outputs


RULES: dict[Any, Rule] = {
    CTC_BEAM_SEARCH: Rule(_beam_search),
    FPS: Rule(_fps),
    NEAREST: Rule(_nearest),
}
