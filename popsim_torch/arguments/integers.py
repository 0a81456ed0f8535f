"""Integers that the device does not have."""

from __future__ import annotations

import torch

from popsim_torch import _native
from popsim_torch.errors import Error

__all__ = ["check_32_bits"]

_LOWEST, _HIGHEST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max


def check_32_bits(what: str, tensor: torch.Tensor) -> None:
    """Refuse int64 values that the device would change: it has integers of 32 bits.

    Args:
        what: The tensor, as the error names it.
        tensor: A tensor with values, of any dtype and shape.

    Raises:
        Error: A value is out of the range of int32.
    """
    if tensor.dtype is not torch.int64 or _native.fits_32_bits(tensor):
        return
    outside = tensor[(tensor < _LOWEST) | (tensor > _HIGHEST)]
    raise Error(
        f"{what} has the integer {outside[0].item()}, and the device has integers from {_LOWEST} "
        f"to {_HIGHEST}. Pass smaller ones (x % 2**31), two tensors of int32 with the upper and "
        "the lower bits, or float32, which rounds."
    )
