"""Puts the sum of the gradients of concurrent stages on the stage whose result they belong to.

Autograd adds the gradients of all uses of a tensor. If concurrent stages have used it, the sum
would be on one of them, which would then wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx

from popsim_torch.trace.graph.origin import move_to_stage, origin_of

__all__ = ["place_sums"]

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def place_sums(gradient: torch.fx.Node, stage: int, position: Callable[[int], int]) -> None:
    """Move the additions of gradients of concurrent stages to the stage of their tensor.

    Args:
        gradient: The complete gradient of a tensor.
        stage: The stage that has computed the tensor.
        position: Returns the position of a stage in the pipeline.
    """
    todo = [gradient]
    while todo:
        node = todo.pop()
        origin, parts = origin_of(node), node.all_input_nodes
        if node.target not in _SUMS or not origin.backward or origin.stage == stage:
            continue
        stages = {origin_of(part).stage for part in parts}
        if len(stages) > 1 and len(set(map(position, stages))) == 1:
            move_to_stage(node, stage)
        todo += parts
