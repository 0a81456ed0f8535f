"""Converts the user's arguments and results to flat lists of tensors, and back."""

from popsim_torch.arguments.arguments import (
    ArgumentSpec,
    OutputSpec,
    micro_batch_shape,
)
from popsim_torch.arguments.structures import ICustomArgParser, registerCustomArgParser

__all__ = [
    "ArgumentSpec",
    "ICustomArgParser",
    "OutputSpec",
    "micro_batch_shape",
    "registerCustomArgParser",
]
