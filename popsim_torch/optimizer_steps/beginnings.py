"""The values with which states begin, which the first step gives them before it changes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.optim.formula import InitialValue
from popsim_torch.optimizer_steps.compare import root_of, subgraph
from popsim_torch.optimizer_steps.traced_step import Cell

__all__ = ["beginning"]


def beginning(
    cell: Cell,
    module: torch.fx.GraphModule,
    node: torch.fx.Node,
    inputs: Sequence[torch.fx.Node],
) -> Cell | None:
    """Return a cell that begins with a number, or with a function of a weight and of numbers.

    Args:
        cell: The cell without its beginning.
        module: The first step.
        node: The value with which the cell begins.
        inputs: The weight of the parameter, and the hyper-parameters.

    Returns:
        The cell; None if the value needs other inputs.
    """
    cell = dataclasses.replace(cell, dtype=node.meta["val"].dtype)
    fill = _fill_of(node)
    if fill is not None:
        return dataclasses.replace(cell, initial=fill)
    graph = subgraph(module, node, inputs)
    if graph is None:
        return None
    # (with the values of the optimizer at hand)
    return dataclasses.replace(cell, initial_from=InitialValue(graph))


def _fill_of(node: torch.fx.Node) -> float | None:
    """Return the number that fills a new tensor; None for any other node."""
    aten = torch.ops.aten
    node = root_of(node)
    target: Any = node.target
    if target in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
        return 0.0
    if target in (aten.ones_like.default, aten.ones.default, aten.new_ones.default):
        return 1.0
    if target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        value: Any = node.args[-1]
        return float(value) if isinstance(value, (int, float)) else None
    return None
