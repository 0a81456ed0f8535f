"""From the traced graph to a program of the device: ir, by table, and from there to C++."""

from popsim_torch.lowering.builder import HalfPartials
from popsim_torch.lowering.lower import LoweringRequest, lower
from popsim_torch.lowering.native import build_executable
from popsim_torch.lowering.program import AnchorTarget, LoopCounts, Program, Return

__all__ = [
    "AnchorTarget",
    "HalfPartials",
    "LoopCounts",
    "LoweringRequest",
    "Program",
    "Return",
    "build_executable",
    "lower",
]
