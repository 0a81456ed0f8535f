"""Lowers the named graph of a trace to a program of the device."""

from popsim_torch.lowering.emit.builder import HalfPartials
from popsim_torch.lowering.lower import lower

__all__ = ["HalfPartials", "lower"]
