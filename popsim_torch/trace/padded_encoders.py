"""``nn.TransformerEncoder`` with padded sequences, when it does not train.

PyTorch then leaves out the padding: it computes with nested tensors, which the device does not
have, and fills the results with zeros, before the last norm. It does so if all padding is at the
end of its sequence, which depends on values. Here the layers run with the mask, and ``where``
writes the zeros.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from popsim_torch.ops import op_listener
from popsim_torch.trace.graph.device import DEVICE

__all__ = ["padded_encoders"]

_on_host = nn.TransformerEncoder.forward


def padded_encoders() -> AbstractContextManager[Any]:
    """Make ``nn.TransformerEncoder`` run without nested tensors in this scope."""
    return mock.patch.object(nn.TransformerEncoder, "forward", _forward)


@functools.wraps(_on_host)
def _forward(
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    padding = src_key_padding_mask
    may_be_nested = (
        op_listener.get() is not None
        and padding is not None
        and getattr(self, "use_nested_tensor", False)
        and torch.backends.mha.get_fastpath_enabled()
        and not self.layers[0].training
        and src.dim() == 3
    )
    if not may_be_nested:
        return _on_host(self, src, mask, padding, is_causal)
    layers_alone: Any = SimpleNamespace(layers=self.layers, norm=None)
    fills = mask is None and not torch.is_autocast_enabled() and not _is_trained(self)
    padded = None if padding is None or not fills else _padded(padding)
    if padded is not None and not getattr(self, "mask_check", True):
        padding = padded = _at_the_end(padded)  # PyTorch takes the length of each sequence only
    output = _on_host(layers_alone, src, mask, padding, is_causal)
    if padded is not None:
        is_aligned = (padded == _at_the_end(padded)).all()
        output = torch.where((padded & is_aligned).unsqueeze(-1), 0.0, output)
    return output if self.norm is None else self.norm(output)


def _padded(padding: torch.Tensor) -> torch.Tensor:
    return padding if padding.dtype == torch.bool else padding != 0


def _at_the_end(padded: torch.Tensor) -> torch.Tensor:
    """Return the mask that has the padding of each sequence at its end."""
    lengths = padded.logical_not().sum(1, keepdim=True)
    return torch.arange(padded.shape[1], device=DEVICE) >= lengths


def _is_trained(encoder: nn.TransformerEncoder) -> bool:
    """Return whether the first layer, which decides, needs gradients."""
    return torch.is_grad_enabled() and any(
        one.requires_grad for one in encoder.layers[0].parameters()
    )
