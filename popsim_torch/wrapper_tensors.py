"""Tensor subclasses that consist of other tensors, such as ``MaskedTensor``.

Their own address has no memory that a device could read.
"""

from __future__ import annotations

import torch

from popsim_torch.private_torch.fake import is_fake

__all__ = ["is_wrapper"]


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, but no memory of its own that holds them."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or is_fake(tensor):
        return False
    return tensor.numel() > 0 and tensor.data_ptr() == 0
