"""The passes over a lowered program, in their order.

``recompute`` comes before the returns are added (``lowering/lower.py``), all others after them.
"""

from __future__ import annotations

from collections.abc import Callable

from popsim_torch.ir import Graph, verify
from popsim_torch.passes.fuse_attention import fuse_attention
from popsim_torch.passes.fuse_elementwise import fuse_elementwise
from popsim_torch.passes.fuse_loss_gradient import fuse_loss_gradient
from popsim_torch.passes.fuse_products import fuse_products
from popsim_torch.passes.group_updates import group_updates

PASSES: tuple[Callable[[Graph], object], ...] = (
    fuse_loss_gradient,
    fuse_elementwise,
    fuse_attention,
    fuse_products,
    group_updates,
)


def run_passes(graph: Graph) -> None:
    """Run every pass on a complete program, in place, and verify it before and after each.

    Raises:
        InternalError: The program breaks a rule; our own bug.
    """
    verify(graph)
    for run_pass in PASSES:
        run_pass(graph)
        verify(graph)
