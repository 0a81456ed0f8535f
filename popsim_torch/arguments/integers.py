"""Integers of the host that the device returns only in part."""

from __future__ import annotations

import torch

from popsim_torch import _native, logs

__all__ = ["warn_of_wide_integers"]


def warn_of_wide_integers(what: str, tensor: torch.Tensor) -> None:
    """Warn, once for each tensor, of int64 values out of the range of int32.

    Args:
        what: The tensor, as the warning names it.
        tensor: A tensor with values, of any dtype and shape.
    """
    if tensor.dtype is torch.int64 and not _native.fits_32_bits(tensor):
        logs.warn_once(
            "%s has integers out of the range of int32. The program computes with all of their 64 "
            "bits, but results come back as int32, without the upper bits. An IPU would cut them "
            "off before.",
            what,
        )
