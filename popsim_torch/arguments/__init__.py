"""Converts the user's arguments and results to flat lists of tensors, and back."""

from popsim_torch.arguments.arguments import ArgumentSpec, micro_batch_shape
from popsim_torch.arguments.parsers import ICustomArgParser, registerCustomArgParser
from popsim_torch.arguments.results import OutputSpec, tensors_inside

__all__ = [
    "ArgumentSpec",
    "ICustomArgParser",
    "OutputSpec",
    "micro_batch_shape",
    "registerCustomArgParser",
    "tensors_inside",
]
