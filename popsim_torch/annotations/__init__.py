"""Annotations of parts of ``forward``: slices, products in slices, groups, overlap."""

from popsim_torch.annotations.multi_conv import MultiConv
from popsim_torch.annotations.overlap import set_overlap_for_input, set_overlap_for_output
from popsim_torch.annotations.products import serializedMatMul
from popsim_torch.annotations.slices import dynamic_slice, dynamic_update

__all__ = [
    "MultiConv",
    "dynamic_slice",
    "dynamic_update",
    "serializedMatMul",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
