"""From the named graph of a trace to a program of the device."""

from popsim_torch.lowering.builder import HalfPartials
from popsim_torch.lowering.lower import LoweringRequest, lower
from popsim_torch.lowering.program import AnchorTarget, LoopCounts, Program, Return

__all__ = [
    "AnchorTarget",
    "HalfPartials",
    "LoopCounts",
    "LoweringRequest",
    "Program",
    "Return",
    "lower",
]
