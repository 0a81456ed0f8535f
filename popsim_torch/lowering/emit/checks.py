"""Adds checks of values to a program: a run that fails one raises an error."""

from __future__ import annotations

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place


def check_range(
    builder: Builder, tensor: Tensor, least: float, most: float, message: str, place: Place
) -> None:
    """Add an op that ends the run if an element is NaN or out of range.

    Args:
        builder: The graph under construction.
        tensor: The tensor to check, of floats.
        least: The least value.
        most: The largest value.
        message: The message of the error.
        place: The place of the op.
    """
    attributes: dict[str, Attribute] = {"least": least, "most": most, "message": message}
    builder.op("within", [tensor], [], attributes, place=place)
