"""What the gradient of an update is before its op runs, where that is anchored.

What the op itself computes in passing are outputs of it (``optim.plan.Term``), so that an anchor
shows the numbers that were used. What stands here no op computes: ops of their own do, beside those
that do the work, so that looking changes no bit and what nobody looks at costs nothing.
"""

from __future__ import annotations

import torch

from popsim_torch.ir import Tensor
from popsim_torch.ir.map_code import MapCode
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import emit_map


def final_gradient(builder: Builder, gradient: Tensor, place: Place) -> Tensor:
    """Return a copy of a gradient after all micro-batches, where its update is."""
    copy = builder.value(gradient.dtype, gradient.shape)
    builder.op("copy", [gradient], [copy], place=place)
    return copy


def velocity_so_far(
    builder: Builder, velocity: Tensor, gradient: Tensor, dampening: Tensor, place: Place
) -> Tensor:
    """Return a combined velocity with the gradients so far, after each micro-batch.

    Args:
        builder: The graph under construction.
        velocity: Without the gradients of this device iteration.
        gradient: Their sum so far.
        dampening: The gradients' factor.
        place: Where the gradient is complete.
    """
    code = MapCode()
    # As the kernels add a gradient to a velocity, with the same bits.
    so_far = code("add", velocity, code("mul", dampening, gradient))
    return emit_map(builder, code, so_far, torch.float32, velocity.shape, place)
