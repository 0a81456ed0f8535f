"""The gradient before the op of an update runs, if it is anchored.

Values that the op itself computes are outputs of the op (``optim.plan.Term``), so an anchor shows
the numbers that were used. No op computes the values in this file: separate ops do, next to those
of the update. So an anchor changes no bit, and a value without an anchor costs nothing.
"""

from __future__ import annotations

import torch

from popsim_torch.ir import Tensor
from popsim_torch.ir.map_code import MapCode
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import emit_map


def final_gradient(builder: Builder, gradient: Tensor, place: Place) -> Tensor:
    """Return a copy of a gradient after all micro-batches, at the place of its update."""
    copy = builder.value(gradient.dtype, gradient.shape)
    builder.op("copy", [gradient], [copy], place=place)
    return copy


def velocity_so_far(
    builder: Builder, velocity: Tensor, gradient: Tensor, dampening: Tensor, place: Place
) -> Tensor:
    """Return a combined velocity with the gradients so far, after each micro-batch.

    Args:
        builder: The graph under construction.
        velocity: The velocity without the gradients of this device iteration.
        gradient: The sum of these gradients so far.
        dampening: The factor of the gradients.
        place: The place at which the gradient is complete.
    """
    graph = builder.graph
    seen, change = graph.as_real(velocity), graph.as_real(gradient)
    code = MapCode()
    # The same operations in which the kernels add a gradient to a velocity, so the bits are the
    # same.
    so_far = code("add", seen, code("mul", dampening, change))
    result = emit_map(builder, code, so_far, torch.float32, seen.shape, place)
    return graph.as_complex(result) if velocity.dtype.is_complex else result
